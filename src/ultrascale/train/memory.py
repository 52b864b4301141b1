"""Memory of one rank: a step's peak by owner (parameters, gradients, …) with the Estimate's definitions, and the host's heap.

On a CPU, whose allocator has no statistics, every storage is tracked through one step. Storages are counted instead of
autograd's saved tensors: hooks on those miss what selective checkpointing caches. Workspaces inside an operator's kernel and
memory of Python, gloo or the thread pool are not counted. On a GPU the allocator reports the peak, states are counted, and the
rest is activations.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ultrascale.parallel.torch_private import FakeTensor, TorchDispatchMode
from ultrascale.parallel.zero import FSDPGrads
from ultrascale.specs.estimate import MEASURED_OWNERS
from ultrascale.specs.measurement import MeasuredMemory
from ultrascale.train.engine import Engine

TRIM_EVERY = 20  # steps: `mini` stays below 1.08 GiB, with 276 s of CPU time instead of 291, which is noise
UNLABELLED = "activations"
T = TypeVar("T")


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, tracks every storage that an operator allocates and those given to `track`, until they are freed.

    `track` may be called again at any time to assign a storage to another owner; gradients are assigned when they are computed
    with `parameter.register_post_accumulate_grad_hook(lambda p: live.track([p.grad], "gradients"))`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self.peak_by_owner: dict[str, int] = {}
        self._by_owner: dict[str, int] = {}
        self._tracked: dict[int, _TrackedStorage] = {}
        self._end_resize: Callable[[], None] | None = None

    @property
    def by_owner(self) -> dict[str, int]:
        """Current bytes by owner; owners without bytes are left out."""
        return {owner: size for owner, size in self._by_owner.items() if size}

    def track(self, tensors: Iterable[Tensor], owner: str) -> None:
        """Counts the storages of these tensors, including those inside DTensors, as the owner's."""
        for tensor in tensors:
            for plain in _plain(tensor):
                self.track_storage(plain.untyped_storage(), owner)

    def reset_peak(self) -> None:
        self.peak, self.peak_by_owner = self.current, self.by_owner

    def __enter__(self) -> Self:
        self._end_resize = _on_resize(self._resized)
        self._begin()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._end(*failure)
        if self._end_resize is not None:
            self._end_resize()

    def _begin(self) -> None:
        """Starts to intercept operators."""
        super().__enter__()  # type: ignore[no-untyped-call]

    def _end(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor is first decomposed into operators on its local tensors, which come back here
        result = func(*args, **(kwargs or {}))
        self.after_operator(func, args, kwargs or {}, result)
        return result

    def after_operator(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Called after an operator has run."""
        for tensor in tensors_in(result):
            if tensor.device.type == "meta":
                continue  # shapes alone, as DeepSpeed keeps of ZeRO-1's and 2's parameters
            storage = tensor.untyped_storage()
            if (tracked := self._tracked.get(id(storage))) is not None:
                self._resize(tracked, storage.nbytes())
            elif func is torch.ops.aten.lift_fresh.default or not _among(storage, args, kwargs):
                self.track_storage(storage)  # otherwise it is a view of an argument

    def track_storage(self, storage: UntypedStorage, owner: str = UNLABELLED) -> None:
        """Counts a storage from now on as this owner's."""
        tracked = self._tracked.get(id(storage))
        if tracked is None:
            tracked = self._tracked[id(storage)] = _TrackedStorage(storage, self._freed)
        else:
            self._resize(tracked, 0)
        tracked.owner = owner
        self._resize(tracked, storage.nbytes())

    def _freed(self, tracked: weakref.ref[UntypedStorage]) -> None:
        assert isinstance(tracked, _TrackedStorage)
        self._resize(tracked, 0)
        del self._tracked[tracked.key]

    def _resized(self, storage: UntypedStorage) -> None:
        tracked = self._tracked.get(id(storage))
        self.track_storage(storage, UNLABELLED if tracked is None else tracked.owner)

    def _resize(self, tracked: _TrackedStorage, size: int) -> None:
        more = size - tracked.size
        if not more:
            return
        tracked.size = size
        self.current += more
        self._by_owner[tracked.owner] = self._by_owner.get(tracked.owner, 0) + more
        if self.current > self.peak:
            self.reset_peak()


class _TrackedStorage(weakref.ref[UntypedStorage]):
    """A weak reference to a storage: torch has one Python object per storage, which is deleted when its memory is freed."""

    __slots__ = ("key", "owner", "size")

    key: int
    owner: str
    size: int

    def __new__(cls, storage: UntypedStorage, freed: Callable[[Any], None]) -> Self:
        self = super().__new__(cls, storage, freed)
        self.key, self.owner, self.size = id(storage), UNLABELLED, 0
        return self


def _on_resize(callback: Callable[[UntypedStorage], None]) -> Callable[[], None]:
    """Calls `callback` after each `storage.resize_`, with which FSDP2 frees memory and which is not an operator.

    Returns a function that removes the callback.
    """
    inherited = "resize_" not in vars(UntypedStorage)
    before = UntypedStorage.resize_

    def resize_(storage: UntypedStorage, size: int) -> Any:
        result = before(storage, size)
        callback(storage)
        return result

    UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]

    def end() -> None:
        if inherited:
            del UntypedStorage.resize_
        else:
            UntypedStorage.resize_ = before  # type: ignore[method-assign]

    return end


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with a tensor's storage: itself, or those inside a wrapper such as DTensor."""
    if hasattr(tensor, "__tensor_flatten__"):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        yield from tensors_in([part for part in parts if isinstance(part, Tensor)])  # a DTensor's mesh is a part too
    elif isinstance(tensor, FakeTensor) or tensor.device.type != "meta":  # a fake tensor's device costs as much as an operator
        yield tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield from _plain(value)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)


def _among(storage: UntypedStorage, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    given = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
    return any(one.untyped_storage() is storage for one in given)


def account(engine: Engine, step: Callable[[], T], live: LiveBytes | None = None) -> tuple[MeasuredMemory, T]:
    """Runs `step`, one whole training step, and returns the memory by owner at its peak, and the result of the step.

    `live`: the tracker to use on a CPU, for a caller that needs more of its results.
    """
    return _by_storages(engine, step, live or LiveBytes()) if engine.mesh.device.type == "cpu" else _by_allocator(engine, step)


def states(engine: Engine) -> dict[str, list[Tensor]]:
    """Tensors that outlive a step, by owner, without those offloaded to the host."""
    layout, device = engine.mesh.layout, engine.mesh.device
    # ZeRO-3's shards are the parameters, unless a gathered copy or another dtype is used in forward.
    shards_compute = layout.zero == 3 and not layout.keep_gathered and engine.job.precision == "fp32"
    found: dict[str, list[Tensor]] = {owner: [] for owner in MEASURED_OWNERS}
    for weight in engine.weights:
        sharded = isinstance(weight.parameter, DTensor)
        found["parameters" if not sharded or shards_compute else "master"].append(weight.local)
        if weight.master is not weight.local:
            found["master"].append(weight.master)
    found["parameters"] += [weight.local for weight in engine.frozen]
    found["optimizer"] = engine.optimizer.state_tensors()
    for chunk in engine.pipeline.chunks.values():
        found["gradients"] += chunk.gradients.allocated()
    for gradients in _sharded(engine):
        found["parameters" if layout.zero < 3 or layout.keep_gathered else "buffers"] += gradients.gathered()
    if layout.offload != "none":
        found["optimizer"], found["master"] = [], []
        if device.type == "cpu" and layout.offload == "parameters":
            found["parameters"] = []
    return found


def _by_storages(engine: Engine, step: Callable[[], T], live: LiveBytes) -> tuple[MeasuredMemory, T]:
    layout, hooks = engine.mesh.layout, []
    # Unsharded gradients before the reduce-scatter; ZeRO-1 accumulates them over micro-batches, in the reduce dtype.
    unsharded = "gradients" if layout.zero == 1 and layout.gas > 1 else "buffers"

    def label_accumulated(gradients: FSDPGrads, split: bool) -> None:
        """Labels accumulated gradients, sharded or not: FSDP2 computes them without calling hooks."""
        live.track(gradients.allocated(), "gradients")
        # Hooks do not fire for deferred weight gradients, which stay in the dtype of backward.
        deferred = [parameter.grad for parameter in gradients.unsharded() if split and parameter.grad is not None]
        live.track([*gradients.accumulated(), *deferred], unsharded)

    with live:
        for owner, tensors in states(engine).items():
            live.track(tensors, owner)
        for gradients in _sharded(engine):
            new = unsharded if not gradients.converts else "buffers"
            trained = [parameter for parameter in gradients.unsharded() if parameter.requires_grad]
            hooks += [_hook(parameter, partial(_track, live, new)) for parameter in trained]
            if layout.gas == 1:  # nothing was accumulated before: the reduce-scatter's output is the gradient
                shards = [parameter for parameter in gradients.shards() if parameter.requires_grad]
                hooks += [_hook(parameter, partial(_track, live, "gradients")) for parameter in shards]
        live.reset_peak()
        with _called_after(_sharded(engine), ("after_backward",), label_accumulated):
            result = step()
    for hook in hooks:
        hook.remove()
    return MeasuredMemory(**{owner: live.peak_by_owner.get(owner, 0) for owner in MEASURED_OWNERS}), result


def _sharded(engine: Engine) -> list[FSDPGrads]:
    reducers = (chunk.gradients for chunk in engine.pipeline.chunks.values())
    return [gradients for gradients in reducers if isinstance(gradients, FSDPGrads)]


@contextmanager
def _called_after(
    reducers: list[FSDPGrads], names: tuple[str, ...], callback: Callable[[FSDPGrads, bool], None]
) -> Iterator[None]:
    """Calls `callback(reducer, split)` after each call of these methods of the reducers."""

    def patched(gradients: FSDPGrads, method: Callable[[bool, bool], None]) -> Callable[[bool, bool], None]:
        def outer(last: bool, split: bool) -> None:
            method(last, split)
            callback(gradients, split)

        return outer

    for gradients in reducers:
        vars(gradients).update({name: patched(gradients, getattr(gradients, name)) for name in names})
    try:
        yield
    finally:
        for gradients in reducers:
            for name in names:
                del vars(gradients)[name]


def _hook(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def _track(live: LiveBytes, owner: str, parameter: Tensor) -> None:
    if parameter.grad is not None:
        live.track([parameter.grad], owner)


def _by_allocator(engine: Engine, step: Callable[[], T]) -> tuple[MeasuredMemory, T]:
    device, sizes = engine.mesh.device, dict.fromkeys(MEASURED_OWNERS, 0)
    torch.cuda.reset_peak_memory_stats(device)

    def sample(*_: Any) -> None:
        sizes.update({owner: max(sizes[owner], size) for owner, size in _current(engine).items()})

    # Before and after every backward: ZeRO's gathered and accumulated tensors exist then, not after the step.
    with _called_after(_sharded(engine), ("before_backward", "after_backward"), sample):
        result = step()
    torch.cuda.synchronize(device)
    sample()
    peak = torch.cuda.max_memory_allocated(device)
    reserved = torch.cuda.max_memory_reserved(device)
    rest = peak - sum(sizes.values())
    return MeasuredMemory(**{**sizes, "activations": max(0, rest), "runtime": reserved - peak}), result


def _current(engine: Engine) -> dict[str, int]:
    """Current bytes by owner."""
    found = states(engine)
    if engine.mesh.layout.zero == 1:
        for gradients in _sharded(engine):
            found["gradients"] += gradients.accumulated()
    return {owner: _bytes(tensors, engine.mesh.device) for owner, tensors in found.items()}


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Total bytes, each storage counted once."""
    storages = {id(tensor.untyped_storage()): tensor for one in tensors for tensor in _plain(one) if tensor.device == device}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def trim_heap() -> None:
    """Returns freed host memory to the system; called on a CPU after every TRIM_EVERY-th step.

    Tensors of a few MiB are in glibc's heap between small objects that outlive them, so its top never sinks: `mini` in two
    processes grew from 0.65 to 1.95 GiB in 150 steps. Mapping each tensor separately takes 0.57 GiB, but nine times the time
    in the kernel.
    """
    with suppress(AttributeError, OSError):  # systems that have no such call return memory themselves
        ctypes.CDLL(None).malloc_trim(0)
