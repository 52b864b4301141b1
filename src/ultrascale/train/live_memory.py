"""What lives in memory, counted storage by storage: the peak of a step on a CPU, where no allocator keeps statistics.

Storages are counted and not autograd's saved tensors: hooks on those do not see what selective checkpointing caches.
Workspaces inside an operator's kernel and memory of Python, gloo or the thread pool are not seen.
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
    """While active, follows every storage that an operator makes and those given to `track`, until they are freed.

    `track` may be called again at any time to give a storage to another owner; gradients are caught as they are made with
    `parameter.register_post_accumulate_grad_hook(lambda p: live.track([p.grad], "gradients"))`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self.peak_by_owner: dict[str, int] = {}
        self._by_owner: dict[str, int] = {}
        self._living: dict[int, _TrackedStorage] = {}
        self._end_resize: Callable[[], None] | None = None

    @property
    def by_owner(self) -> dict[str, int]:
        """Owner → bytes now; owners of nothing are left out."""
        return {owner: size for owner, size in self._by_owner.items() if size}

    def track(self, tensors: Iterable[Tensor], owner: str) -> None:
        """Count the storages of these tensors, those inside DTensors too, as the owner's."""
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
        """From here on operators are seen."""
        super().__enter__()  # type: ignore[no-untyped-call]

    def _end(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor first becomes operators on its local tensors: those come back here
        result = func(*args, **(kwargs or {}))
        self.saw(func, args, kwargs or {}, result)
        return result

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """An operator has run."""
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if (living := self._living.get(storage._cdata)) is not None:
                self._resize(living, storage.nbytes())
            elif func is torch.ops.aten.lift_fresh.default or not _among(storage, args, kwargs):
                self.follow(storage)  # else a view of what was there before

    def follow(self, storage: UntypedStorage, owner: str = UNLABELLED) -> None:
        """Count it from now on, as this owner's."""
        living = self._living.get(storage._cdata)
        if living is None:
            living = self._living[storage._cdata] = _TrackedStorage(storage, self._freed)
        else:
            self._resize(living, 0)
        living.owner = owner
        self._resize(living, storage.nbytes())

    def _freed(self, living: weakref.ref[UntypedStorage]) -> None:
        assert isinstance(living, _TrackedStorage)
        self._resize(living, 0)
        del self._living[living.key]

    def _resized(self, storage: UntypedStorage) -> None:
        living = self._living.get(storage._cdata)
        self.follow(storage, UNLABELLED if living is None else living.owner)

    def _resize(self, living: _TrackedStorage, size: int) -> None:
        more = size - living.size
        if not more:
            return
        living.size = size
        self.current += more
        self._by_owner[living.owner] = self._by_owner.get(living.owner, 0) + more
        if self.current > self.peak:
            self.reset_peak()


class _TrackedStorage(weakref.ref[UntypedStorage]):
    """A storage that is followed: torch keeps one Python object per storage, which ends when its memory does."""

    __slots__ = ("key", "owner", "size")

    key: int
    owner: str
    size: int

    def __new__(cls, storage: UntypedStorage, freed: Callable[[Any], None]) -> Self:
        self = super().__new__(cls, storage, freed)
        self.key, self.owner, self.size = storage._cdata, UNLABELLED, 0
        return self


def _on_resize(seen: Callable[[UntypedStorage], None]) -> Callable[[], None]:
    """Call `seen` after each `storage.resize_`, by which FSDP2 frees and which is no operator; returns what ends it."""
    inherited = "resize_" not in vars(UntypedStorage)
    before = UntypedStorage.resize_

    def resize_(storage: UntypedStorage, size: int) -> Any:
        result = before(storage, size)
        seen(storage)
        return result

    UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]

    def end() -> None:
        if inherited:
            del UntypedStorage.resize_
        else:
            UntypedStorage.resize_ = before  # type: ignore[method-assign]

    return end


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold a tensor's bytes: itself, or those inside a wrapper such as DTensor."""
    if hasattr(tensor, "__tensor_flatten__"):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        yield from _tensors([part for part in parts if isinstance(part, Tensor)])  # a DTensor's mesh is a part too
    elif isinstance(tensor, FakeTensor) or tensor.device.type != "meta":  # where a fake one is costs as much as an operator
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
