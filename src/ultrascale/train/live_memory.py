"""Live and peak memory of a step, counted by storage, for a CPU, whose allocator has no statistics.

Storages are counted instead of autograd's saved tensors: hooks on those miss what selective checkpointing caches.
Workspaces inside an operator's kernel and memory of Python, gloo or the thread pool are not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

UNLABELLED = "activations"


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
                self.follow(plain.untyped_storage(), owner)

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
        self.saw(func, args, kwargs or {}, result)
        return result

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Called after an operator has run."""
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if (tracked := self._tracked.get(storage._cdata)) is not None:
                self._resize(tracked, storage.nbytes())
            elif func is torch.ops.aten.lift_fresh.default or not _among(storage, args, kwargs):
                self.follow(storage)  # otherwise it is a view of an argument

    def follow(self, storage: UntypedStorage, owner: str = UNLABELLED) -> None:
        """Counts a storage from now on as this owner's."""
        tracked = self._tracked.get(storage._cdata)
        if tracked is None:
            tracked = self._tracked[storage._cdata] = _TrackedStorage(storage, self._freed)
        else:
            self._resize(tracked, 0)
        tracked.owner = owner
        self._resize(tracked, storage.nbytes())

    def _freed(self, tracked: weakref.ref[UntypedStorage]) -> None:
        assert isinstance(tracked, _TrackedStorage)
        self._resize(tracked, 0)
        del self._tracked[tracked.key]

    def _resized(self, storage: UntypedStorage) -> None:
        tracked = self._tracked.get(storage._cdata)
        self.follow(storage, UNLABELLED if tracked is None else tracked.owner)

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
        self.key, self.owner, self.size = storage._cdata, UNLABELLED, 0
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
        yield from _tensors([part for part in parts if isinstance(part, Tensor)])  # a DTensor's mesh is a part too
    elif isinstance(tensor, FakeTensor) or tensor.device.type != "meta":  # a fake tensor's device costs as much as an operator
        yield tensor


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield from _plain(value)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)


def _among(storage: UntypedStorage, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    given = [*_tensors(args), *_tensors(list(kwargs.values()))]
    return any(one.untyped_storage()._cdata == storage._cdata for one in given)
