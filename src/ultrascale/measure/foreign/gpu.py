"""A GPU that does not exist: answers of torch.cuda, and tensors of the device `cuda` that are tensors without memory.

torch without CUDA cannot run a backward on tensors of the device `cuda`, even without memory. So every call that names the
device gets the CPU instead, with what a GPU would choose by default: flash attention, fused norms, multi-tensor optimizers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxOutput, BlockMask, create_block_mask, flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from ultrascale.measure.foreign.request import CannotRehearseError
from ultrascale.measure.rehearse_world import QuickFakeTensorMode, split_evenly
from ultrascale.parallel.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    foreach_on_cpu,
    fused_rms_norm_on_cpu,
)
from ultrascale.specs.units import GIB

NAME, MEMORY_GIB, CAPABILITY = "NVIDIA H100 80GB HBM3", 79.1, (9, 0)
"""what the GPU says it is: engines choose kernels by it"""
CPU = torch.device("cpu")
aten = torch.ops.aten


def replace_everywhere(pairs: Sequence[tuple[Any, Any]]) -> None:
    """The first of each pair by the second, in every module that has imported it."""
    after = {id(before): value for before, value in pairs}
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            if id(value) in after:
                setattr(module, name, after[id(value)])


def on_cpu(device: Any) -> Any:
    """The CPU for the GPU; any other value as it is."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, int):  # a GPU's number
        return CPU
    return "cpu" if isinstance(device, str) and device.partition(":")[0] == "cuda" else device


class GpuOnCpu(TorchFunctionMode):
    """Calls that name the GPU get the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if given.get("device") is not None:
            given["device"] = on_cpu(given["device"])
        given.pop("pin_memory", None)
        if func in _NAMES_DEVICE:
            args = (args[0], *(_moved(value) for value in args[1:]))
        return func(*args, **given)


_NAMES_DEVICE = {Tensor.to, Tensor.new_tensor, torch.get_rng_state, Tensor.is_pinned}


def _moved(value: Any) -> Any:
    return on_cpu(value) if isinstance(value, (str, torch.device)) else value


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernels of a GPU in bf16: flash attention, or the memory-efficient one where there is a mask."""
    if attn_mask is None:
        return _kernel(query, key, value, dropout_p, is_causal, scale)[0]
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    if attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = aten._scaled_dot_product_efficient_attention
    return cast(Tensor, efficient(query, key, value, mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0])


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The output and its log-sum-exp. Flash attention needs heads of one size, which those of MLA are not."""
    if query.shape[-1] == value.shape[-1]:
        found = aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, scale=scale)
    else:
        found = aten._scaled_dot_product_efficient_attention(query, key, value, None, True, dropout, causal, scale=scale)
    return found[0], found[1]


def flexible_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """In place of torch's flex_attention, which has no backward on a CPU: flash attention keeps the same tensors."""
    found = _kernel(query, key, value, 0.0, block_mask is not None, scale)
    if return_aux is not None:
        return found[0], AuxOutput(lse=found[1])
    return (found[0], found[1]) if return_lse else found[0]


def empty_block_mask(
    mask_mod: Any, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None, BLOCK_SIZE: Any = 128, **_: Any
) -> BlockMask:
    """A mask as a compiled create_block_mask allocates it: without the scores that the eager one evaluates."""
    sizes = BLOCK_SIZE if isinstance(BLOCK_SIZE, tuple) else (BLOCK_SIZE, BLOCK_SIZE)
    rows, columns = -(-Q_LEN // sizes[0]), -(-KV_LEN // sizes[1])
    counts = [torch.zeros(B or 1, H or 1, rows, dtype=torch.int32) for _ in range(2)]
    places = [torch.zeros(B or 1, H or 1, rows, columns, dtype=torch.int32) for _ in range(2)]
    return BlockMask.from_kv_blocks(
        counts[0], places[0], counts[1], places[1], BLOCK_SIZE=sizes, mask_mod=mask_mod, seq_lengths=(Q_LEN, KV_LEN)
    )


def histogram(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """In place of torch.histc, which counts whole numbers on a GPU alone."""
    return cast(Tensor, aten.histc(input.float(), bins, min, max)).to(input.dtype)


class ValuesOfZero(QuickFakeTensorMode):  # type: ignore[no-untyped-call]
    """Tensors without memory whose values can be read: numbers are zero, and a mask selects everything.

    A list of whole numbers is read as rows for each expert: as many as the router's last topk selected, or histc
    counted, evenly. Compiled code has no topk where another rule replaces its choice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.routed = 0
        FakeTensor.tolist = lambda tensor: self._list(tensor)  # type: ignore[method-assign,assignment]
        FakeTensor.data_ptr = _address  # type: ignore[method-assign,assignment]

    def _list(self, tensor: FakeTensor) -> Any:
        if tensor.constant is not None:
            return tensor.constant.tolist()
        if tensor.dim() == 0:
            return tensor.item()
        if tensor.dim() > 1:
            return [row.tolist() for row in tensor]
        return [0.0] * len(tensor) if tensor.is_floating_point() else split_evenly(self.routed, len(tensor))

    def __deepcopy__(self, _: Any) -> ValuesOfZero:
        return self  # of every tensor of a model that is copied

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and "device" in kwargs:  # in a backward, where torch has no function modes
            kwargs = {**kwargs, "device": on_cpu(kwargs["device"])}
        result = super().dispatch(func, types, args, kwargs)
        if result is NotImplemented:  # of DTensors, whose local tensors come back here
            return result
        if func is aten.topk.default:
            self.routed = result[1].numel()
        elif func is aten.histc.default:
            self.routed = args[0].numel()
        return result

    def _slowly(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super()._slowly(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            with self:  # else these would be tensors with memory
                return _of_zeros(func._overloadpacket, args, kwargs)


def _address(tensor: Tensor) -> int:
    """Of no memory, but another for each storage: engines recognise parameters by it."""
    return (id(tensor.untyped_storage()) << 40) + int(tensor.storage_offset()) * tensor.itemsize


def _of_zeros(packet: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator whose value or shape depends on values."""
    if packet is aten._local_scalar_dense:
        kind = args[0].dtype
        return 0.0 if kind.is_floating_point else False if kind is torch.bool else 0
    if packet in (aten.equal, aten.is_nonzero):
        return False
    if packet is aten.nonzero:
        return torch.zeros(args[0].numel(), args[0].dim(), dtype=torch.int64)
    if packet is aten.bincount:
        return torch.zeros(kwargs.get("minlength", args[2] if len(args) > 2 else 0), dtype=torch.int64)
    if packet is aten.masked_select:
        return (args[0] + torch.zeros_like(args[1], dtype=args[0].dtype)).reshape(-1)
    if packet is aten.index:
        return aten.index(args[0], _without_masks(args[1]))
    raise CannotRehearseError(f"the result of {packet} depends on values, which tensors do not have here: try --device cuda")


def _without_masks(indices: Any) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found += [torch.zeros(index.numel(), dtype=torch.int64) for _ in range(index.dim())]
        else:
            found.append(index)
    return found


class _Stream:
    """A stream or an event: work is done when it is called."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.stream_id, self.cuda_stream, self.device_index = CPU, 0, 0, 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0

    def __getattr__(self, name: str) -> Any:
        if name in ("record", "wait", "synchronize", "wait_event", "wait_stream"):
            return lambda *_, **__: None
        raise AttributeError(name)


_NOTHING = (
    *("init", "set_device", "set_stream", "synchronize", "empty_cache", "ipc_collect", "set_rng_state"),
    *("manual_seed", "manual_seed_all", "seed_all", "set_per_process_memory_fraction"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_accumulated_memory_stats"),
)
"""functions of torch.cuda that have nothing to do"""


def _answer(value: Callable[[], Any]) -> Callable[..., Any]:
    """Each is a function of its own: torch.compile refuses one under two names."""
    return lambda *_, **__: value()


def answer_for_gpu(local_rank: int, gpus_per_node: int, allocated: Callable[[], tuple[int, int]]) -> None:
    """Replaces functions of torch.cuda in this process. `allocated`: bytes now and at the peak."""
    properties = SimpleNamespace(
        name=NAME, total_memory=int(MEMORY_GIB * GIB), major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132
    )
    stream = _Stream()

    def statistics() -> dict[str, int]:
        now, most = allocated()
        found = {"num_alloc_retries": 0, "num_ooms": 0}
        for kind in ("allocated", "active", "reserved", "requested"):
            found |= {f"{kind}_bytes.all.current": now, f"{kind}_bytes.all.peak": most}
        return found

    answers: dict[str, Callable[[], Any]] = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), lambda: True),
        **dict.fromkeys(_NOTHING, lambda: None),
        **dict.fromkeys(("memory_allocated", "memory_reserved"), lambda: allocated()[0]),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), lambda: allocated()[1]),
        **dict.fromkeys(("current_stream", "default_stream"), lambda: stream),
        **dict.fromkeys(("stream", "device"), nullcontext),
        "current_device": lambda: local_rank,
        "device_count": lambda: gpus_per_node,
        "get_device_properties": lambda: properties,
        "get_device_name": lambda: NAME,
        "get_device_capability": lambda: CAPABILITY,
        "get_rng_state": torch.get_rng_state,
        "mem_get_info": lambda: (properties.total_memory - allocated()[0], properties.total_memory),
        "memory_stats": statistics,
        "memory_summary": lambda: "",
    }
    pairs: list[tuple[Any, Any]] = [(getattr(torch.cuda, name), _answer(value)) for name, value in answers.items()]
    pairs += [(torch.cuda.Stream, _Stream), (torch.cuda.Event, _Stream)]
    pairs += [(functional.scaled_dot_product_attention, attention)]
    pairs += [(flex_attention, flexible_attention), (create_block_mask, empty_block_mask), (torch.histc, histogram)]
    replace_everywhere(pairs)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _answer(lambda: 0))
    foreach_on_cpu()
    fused_rms_norm_on_cpu()
    convert_by_replacement()
    _run_on_cpu()
    _read_in_process()


def _read_in_process() -> None:
    """Data loaders read without processes of their own: tensors without memory cannot be sent."""
    build = DataLoader.__init__

    @functools.wraps(build)
    def outer(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args[:5], **{name: value for name, value in kwargs.items() if name not in _OF_WORKERS})

    DataLoader.__init__ = outer  # type: ignore[method-assign]


_OF_WORKERS = {
    *("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device"),
}


def _run_on_cpu() -> None:
    """Autocast, loss scaling and the default device name their device outside of what a function mode sees."""
    torch.set_default_device = _first_on_cpu(torch.set_default_device)
    _autocast_on_cpu()
    scaler = torch.amp.grad_scaler.GradScaler
    build = _first_on_cpu(scaler.__init__)

    @functools.wraps(build)
    def build_on_cpu(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        build(self, device, *args, **kwargs)

    scaler.__init__ = build_on_cpu  # type: ignore[method-assign]


def _autocast_on_cpu() -> None:
    """In fp32 too, as routers are: torch refuses that format on a CPU, and would cast nothing."""
    build = _first_on_cpu(torch.amp.autocast_mode.autocast.__init__)

    @functools.wraps(build)
    def outer(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        build(self, device_type, dtype, enabled and dtype != torch.float32, cache_enabled)
        if enabled and dtype == torch.float32:
            self._enabled = True

    torch.amp.autocast_mode.autocast.__init__ = outer  # type: ignore[method-assign]


def _first_on_cpu(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return inner(*(_moved(one) for one in args), **{name: _moved(value) for name, value in kwargs.items()})

    return outer


def convert_by_replacement() -> None:
    """`module.to(...)` replaces parameters that it converts: torch would swap their contents, which fake tensors refuse."""
    inner = nn.Module._apply

    @functools.wraps(inner)
    def outer(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]
        given = dict(module._parameters)
        fakes = {name: one for name, one in given.items() if isinstance(one, FakeTensor)}
        for name in fakes:
            del module._parameters[name]
        inner(module, fn, recurse=False)  # type: ignore[no-untyped-call]
        converted = {name: _converted(one, fn) for name, one in fakes.items()}
        found = {name: converted.get(name, module._parameters.get(name)) for name in given}
        module._parameters.clear()  # in place: torch.compile's wrapper would hand a new dictionary to the module inside
        module._parameters.update(found)
        return module

    nn.Module._apply = outer  # type: ignore[method-assign]


@torch.no_grad()
def _converted(parameter: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Once for each parameter, so that tied ones stay so."""
    found = getattr(parameter, "_converted", None)
    if found is None:
        tensor = fn(parameter)
        found = parameter if tensor is parameter else nn.Parameter(tensor, parameter.requires_grad)
        if found is not parameter:
            for name, value in vars(parameter).items():  # what an engine has written on it
                vars(found).setdefault(name, value)
            parameter._converted = found
    return found


@contextmanager
def without_gpu(fake: QuickFakeTensorMode) -> Iterator[None]:
    with GpuOnCpu(), fake:
        yield
