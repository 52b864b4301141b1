"""Fast tensors without memory: torch's FakeTensorMode behind a cache with cheap keys.

A step repeats few operators on few shapes many times. The result of the first call is stored as a recipe (shapes, strides,
which argument's storage is shared) and repeated without torch; unusual operators always go to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, UntypedStorage

from ultrascale.parallel.torch_private import FakeTensor, FakeTensorMode, in_kernel_invocation_manager, make_subclass

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
CPU = torch.device("cpu")
_DEVICE = torch.ops.prim.device.default


class _OutputRecipe(NamedTuple):
    """How to make an output: argument `of` itself (shape None), a view of it, or (-1) a new tensor."""

    of: int
    shape: tuple[int, ...] | None
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int


class _Unusual(Exception):  # falls back to torch
    pass


_SLOW = object()
_KNOWN: dict[torch.dtype, dict[Any, Any]] = {}


class OperatorObserver(Protocol):
    """Is called for every operator, which is cheaper than another dispatch mode."""

    def follow(self, storage: UntypedStorage) -> None:
        """An operator allocates this storage."""

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """An operator ran whose new storages were already passed to `follow`."""

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Any other operator ran."""


class QuickFakeTensorMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.watcher: OperatorObserver | None = None
        # Shared by all ranks that this process rehearses: recipes do not depend on the rank.
        self._known = _KNOWN.setdefault(torch.get_default_dtype(), {})
        self._attributes: dict[str, Any] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the check costs time at every operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # queried more often than operators run
            return args[0].fake_device
        return self.dispatch(func, types, args, kwargs)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace = func.namespace
        if namespace == "profiler":
            return func(*args, **kwargs)
        if namespace == "c10d":  # only writes into its arguments
            with in_kernel_invocation_manager(self):
                result = func(*args, **kwargs)
            if self.watcher is not None:
                self.watcher.saw(func, args, kwargs, result)
            return result
        try:
            key = (func, _key(args), _key(tuple(kwargs.items())) if kwargs else None)
        except _Unusual:
            return self._slowly(func, types, args, kwargs)
        known = self._known.get(key)
        if known is None:
            result = self._slowly(func, types, args, kwargs)
            self._known[key] = _recipe(func, result, args) if key[1] == _key(args) else _SLOW
            return result
        if known is _SLOW:
            return self._slowly(func, types, args, kwargs)
        recipes, pack = known
        result = pack([self._make(one, args) for one in recipes])
        if self.watcher is not None:
            self.watcher.ran(func, args, kwargs, result)
        return result

    def _slowly(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        watcher, self.watcher = self.watcher, None  # an operator may decompose into others, which come back here
        try:
            result = super().dispatch(func, types, args, kwargs)
        finally:
            self.watcher = watcher
        if watcher is not None and result is not NotImplemented:
            watcher.saw(func, args, kwargs, result)
        return result

    def _make(self, made: _OutputRecipe, args: Sequence[Any]) -> Any:
        if made.shape is None:
            return args[made.of]
        if made.of < 0:
            meta = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
            if self.watcher is not None:
                self.watcher.follow(meta.untyped_storage())
        else:
            meta = torch.empty(0, dtype=made.dtype, device="meta")
            meta.set_(args[made.of].untyped_storage(), made.offset, made.shape, made.stride)
        if self._attributes is None:
            self._attributes = dict(vars(FakeTensor(self, meta, CPU)))
        fake = make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=CPU)
        vars(fake).update(self._attributes)
        return fake


def _key(value: Any) -> Any:
    kind = type(value)
    if kind is tuple or kind is list:
        return tuple([_key(one) for one in value])
    if isinstance(value, Tensor):
        if not isinstance(value, FakeTensor) or value.constant is not None or value.fake_device != CPU:
            raise _Unusual
        return value.shape, value.stride(), value.dtype, value.storage_offset()
    if kind in _PLAIN:
        return kind, value
    raise _Unusual


def _one(values: list[Any]) -> Any:
    return values[0]


def _nothing(_: list[Any]) -> None:
    return None


def _recipe(func: Any, result: Any, args: Sequence[Any]) -> Any:
    """How to make this result from these arguments; _SLOW where torch has to."""
    pack: Callable[[list[Any]], Any]
    if func is torch.ops.aten.lift_fresh.default:
        return _SLOW  # returns its argument, which is new to the observer
    if result is None:
        return (), _nothing
    if isinstance(result, Tensor):
        outputs, pack = [result], _one
    elif type(result) in (tuple, list) and all(isinstance(one, Tensor) for one in result):
        outputs, pack = list(result), type(result)
    else:
        return _SLOW
    storages = [id(arg.untyped_storage()) if isinstance(arg, Tensor) else None for arg in args]
    made, fresh = [], set()
    for out in outputs:
        if type(out) is not FakeTensor or out.fake_device != CPU or out.constant is not None:
            return _SLOW
        storage = out.untyped_storage()
        same = next((place for place, arg in enumerate(args) if arg is out), None)
        if same is not None:
            made.append(_OutputRecipe(same, None, (), out.dtype, 0))
        elif id(storage) in storages:
            made.append(
                _OutputRecipe(storages.index(id(storage)), tuple(out.shape), out.stride(), out.dtype, int(out.storage_offset()))
            )
        elif id(storage) in fresh or out.storage_offset() or storage.nbytes() != _span(out):
            return _SLOW
        else:
            fresh.add(id(storage))
            made.append(_OutputRecipe(-1, tuple(out.shape), out.stride(), out.dtype, 0))
    return tuple(made), pack


def _span(tensor: Tensor) -> int:
    """Bytes of a storage of its own."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.dtype.itemsize
