"""The world of a rehearsed rank: process groups that do nothing, tensors without memory, stand-ins for GPU kernels.

Losses and norms are read as zero, and experts receive equal numbers of rows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import ProfilerActivity, profile

import ultrascale.kernels
from ultrascale.kernels import float8, float8_block, float8_gemm, fused, loss, selection
from ultrascale.measure import rehearse_float8 as float8_kernels
from ultrascale.model import attention, operators, self_attention, transformer
from ultrascale.model.linear_attention import CHUNK
from ultrascale.model.rotary import Rope
from ultrascale.parallel.comm import Axis
from ultrascale.parallel.mesh import Mesh, join
from ultrascale.parallel.torch_private import (
    FakeTensor,
    FakeTensorMode,
    all_gather_coalesced,
    fake_store,
    finished_work,
    in_kernel_invocation_manager,
    make_subclass,
    wait_tensor,
)
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training
from ultrascale.train.engine import Engine

_ABSENT = object()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def single_rank_world(rank: int, world: int) -> Iterator[None]:
    """This process as one rank of a world without the others."""
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def without_memory(routed: int) -> Iterator[QuickFakeTensorMode]:
    """Tensors have shapes and storage sizes but no data. `routed`: rows that a rank's experts receive."""

    def tolist(tensor: FakeTensor) -> Any:
        if tensor.dim() > 1:
            return [tolist(row) for row in tensor]
        if tensor.is_floating_point():
            return [0.0] * len(tensor)
        return split_evenly(routed, len(tensor))

    with ExitStack() as stack:
        stack.enter_context(replaced(FakeTensor, "tolist", tolist))
        for owner in (self_attention, transformer):
            stack.enter_context(replaced(owner, "window_bias", window_bias))
        yield stack.enter_context(QuickFakeTensorMode())


def window_bias(length: int, window: int, dtype: torch.dtype, device: torch.device, chunked: bool = False) -> Tensor:
    """As on a GPU, whose block masks are small: one element in memory."""
    return torch.zeros((), dtype=dtype, device=device).expand(length, length)


def unconnected_groups(mesh: Mesh) -> tuple[Mesh, dict[str, str]]:
    """The mesh with separate process groups for each technique, and the technique of each group by name."""
    data = "zero" if mesh.layout.zero else "data"
    owners = {
        **dict.fromkeys(("tp", "kv"), "tensor"),
        "cp": "context",
        "ep": "expert",
        **dict.fromkeys(("pp", "ends"), "pipeline"),
        **dict.fromkeys(("data", "shard", "replica", "expert_data", "expert_shard"), data),
        **dict.fromkeys(("stage", "copies", "expert_copies"), "muon"),
        **dict.fromkeys(("parts", "world"), "bookkeeping"),
    }
    groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
    axes: dict[str, Any] = {}
    for name, technique in owners.items():
        axis: Axis = getattr(mesh, name)
        if axis.group is not None:
            key = technique, axis.ranks
            groups[key] = groups.get(key) or join(axis.ranks)
            axes[name] = replace(axis, group=groups[key])
    return replace(mesh, **axes), {group.group_name: technique for (technique, _), group in groups.items()}


def split_evenly(rows: int, takers: int) -> list[int]:
    """Split rows as evenly as possible, larger parts first."""
    each, rest = divmod(rows, takers)
    return [each + (taker < rest) for taker in range(takers)]


def routed_rows(job: Job, layout: Layout) -> int:
    """Rows that a rank sends to experts in one layer, and receives if experts are balanced."""
    return layout.mbs * job.seq // layout.cp * (job.model.moe.top_k if job.model.moe else 1)


class ConstantBatches:
    """Batches of zeros: a rehearsal depends only on the number of tokens."""

    def __init__(self, seq: int) -> None:
        self.seq = seq

    def train(self, step: int, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.zeros(len(rows), self.seq, dtype=torch.int64) for _ in range(2))  # type: ignore[return-value]

    def losses(self, step: int, held_out: bool) -> int:
        return self.seq


class RandomBatches(ConstantBatches):
    """Where values matter: experts are chosen by them, and GEMMs of equal rows take less power."""

    def __init__(self, seq: int, vocab: int) -> None:
        super().__init__(seq)
        self.vocab, self.generator = vocab, torch.Generator().manual_seed(0)

    def train(self, step: int, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(0, self.vocab, (len(rows), self.seq + 1), generator=self.generator)
        return tokens[:, :-1], tokens[:, 1:]


def without_values(engine: Engine) -> None:
    """Read losses and norms as zero: sums over missing ranks may be anything."""

    def zeroed(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: torch.zeros_like(inner(*args))

    owners: tuple[tuple[Any, str], ...] = ((engine, "_sum_of_losses"), (engine.optimizer, "norm"))
    for owner, name in owners:
        setattr(owner, name, zeroed(getattr(owner, name)))


def kernel_times(step: Callable[[], object]) -> dict[str, float]:
    """Seconds by kernel of one step on a GPU, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:  # else it warns of a second cycle
        step()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in profiled.key_averages():
        times[event.key] += event.self_device_time_total / 1e6
    return dict(times.most_common())


def step_time(step: Callable[[], object], repeat: int = 3) -> float:
    """Seconds of one step on a GPU, the mean of some."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeat):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeat


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Engines built in this context use stand-ins of our GPU kernels, which only allocate their outputs.

    What torch.compile would fuse runs operator by operator, which keeps as much and holds more for a moment.
    """
    choose = selection.choose

    def choose_for_gpu(job: Job, layout: Layout, training: Training, _: str) -> selection.Kernels:
        return replace(choose(job, layout, training, "cuda"), compiled=False, cuda_graphs=False)

    with ExitStack() as stack:
        for owner, name, value in (
            (selection, "choose", choose_for_gpu),
            *(
                (fused, one.__name__, one)
                for one in (norm, norm_backward, rotate_, rotate_back, gate, gate_backward, merge_attention_)
            ),
            *(
                (loss, one.__name__, one)
                for one in (loss_and_gradient, shard_statistics, shard_gradient, scaled, accumulate_matmul)
            ),
            *((float8_block, name, function) for name, function in float8_kernels.BLOCK.items()),
            *((float8, name, function) for name, function in float8_kernels.HEAD.items()),
            (float8_gemm, "_dequantize", float8_kernels.dequantized),
            (operators, "rms_norm", rms_norm),
            (attention, "_expand", _few_heads),
            (attention, "_gather", _few_heads),
            (ultrascale.kernels, "adamw_triton", _ADAMW),
            (ultrascale.kernels, "delta_rule_triton", _DELTA_RULE),
        ):
            stack.enter_context(replaced(owner, name, value))
        yield


def norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = x if added is None else torch.empty_like(x)
    return total, torch.empty_like(x), torch.empty(len(x), dtype=torch.float32)


def norm_backward(grad: Tensor, x: Tensor, scales: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(x)


def rotate_(qkv: Tensor, heads: int, kv_heads: int, rope: Rope) -> None:
    pass  # in place


def rotate_back(q: Tensor, k: Tensor, v: Tensor, rope: Rope) -> Tensor:
    return q.new_empty(len(q), q.shape[1] + 2 * k.shape[1], q.shape[2])


def gate(both: Tensor) -> Tensor:
    return both.new_empty(len(both), both.shape[1] // 2)


def gate_backward(grad: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(both), torch.empty_like(grad)


def merge_attention_(out: Tensor, lse: Tensor, tile_out: Tensor, tile_lse: Tensor) -> None:
    pass  # in place


def loss_and_gradient(logits: Tensor, targets: Tensor, losses: Tensor, z_loss: float) -> Tensor:
    return logits


def shard_statistics(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    return torch.empty(2, len(logits), dtype=torch.float32)


def shard_gradient(logits: Tensor, targets: Tensor, first: int, statistics: Tensor, losses: Tensor, z_loss: float) -> Tensor:
    return logits


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def accumulate_matmul(total: Tensor, left: Tensor, right: Tensor, fresh: bool) -> None:
    """A GEMM that adds to `total`; here with the same FLOPs, into as much of its memory as the operands' format takes."""
    torch.mm(left, right, out=total.view(left.dtype)[:, : total.shape[1]])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _Norm.apply(x, weight)  # type: ignore[no-untyped-call, no-any-return]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _few_heads(x: Tensor, groups: int) -> Tensor:
    """[b, s, heads, d] to [b, heads, s, d] or back: GPU kernels accept fewer kv heads than query heads."""
    return x.transpose(1, 2)


def _nothing(*_: object, **__: object) -> Tensor:
    return torch.zeros(())


_ADAMW = SimpleNamespace(
    step_inputs=_nothing,
    AdamWTensors=_nothing,
    MultiTensorAdamW=lambda _: SimpleNamespace(step=_nothing, sum_of_squares=_nothing),
)


def _of_chunks(k: Tensor, v: Tensor, *widths: int) -> list[Tensor]:
    """A tensor [value heads of all sequences, chunks, …] for each width, that of a chunk's tokens."""
    chunks = -(-v.shape[1] // CHUNK)
    return [k.new_empty(v.shape[0] * v.shape[2], chunks, CHUNK * width) for width in widths]


def _prepare(k: Tensor, v: Tensor, _: Tensor, __: Tensor, backward: bool) -> list[Tensor]:
    return _of_chunks(k, v, v.shape[-1], k.shape[-1], CHUNK * backward)


def _scan_states(k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    return _of_chunks(k, v, k.shape[-1] * v.shape[-1] // CHUNK)[0]


def _scan_back(grad: Tensor, _: Tensor, k: Tensor, *__: Tensor) -> list[Tensor]:
    return _of_chunks(k, grad, k.shape[-1] * grad.shape[-1] // CHUNK, grad.shape[-1])


def _delta_rule_gradients(inputs: tuple[Tensor, ...], *_: Tensor) -> list[Tensor]:
    q, k, *others = inputs
    return [one.new_empty(*others[0].shape[:3], one.shape[-1]) for one in (q, k)] + [torch.empty_like(one) for one in others]


_DELTA_RULE = SimpleNamespace(
    prepare=_prepare,
    scan=lambda _, __, v, *___: torch.empty_like(v),
    scan_states=_scan_states,
    scan_back=_scan_back,
    gradients=_delta_rule_gradients,
)
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


class _UncacheableError(Exception):  # falls back to torch
    pass


_SLOW = object()
_KNOWN: dict[torch.dtype, dict[Any, Any]] = {}


class QuickFakeTensorMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Tensors without memory: torch's FakeTensorMode behind a cache with cheap keys, three times as fast.

    A step repeats few operators on few shapes many times. The result of the first call is stored as a recipe (shapes, strides,
    which argument's storage is shared) and repeated without torch; unusual operators always go to torch.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.watcher: Any = None
        """an OperatorTracker: calling it is cheaper than another dispatch mode"""
        # Shared by all ranks that this process rehearses: recipes do not depend on the rank.
        self._known = _KNOWN.setdefault(torch.get_default_dtype(), {})
        self._attributes: dict[str, Any] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing in an operator is compiled, and the check costs time at every one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # queried more often than operators run
            return args[0].fake_device
        return self.dispatch(func, types, args, kwargs)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is wait_tensor:
            return args[0]
        namespace = func.namespace
        if namespace == "profiler":
            return func(*args, **kwargs)
        if namespace == "c10d":  # only writes into its arguments
            with in_kernel_invocation_manager(self):
                # torch has none of several tensors without memory.
                result = finished_work() if func is all_gather_coalesced else func(*args, **kwargs)
            if self.watcher is not None:
                self.watcher.after_operator(func, args, kwargs, result)
            return result
        try:
            key = (func, _key(args), _key(tuple(kwargs.items())) if kwargs else None)
        except _UncacheableError:
            return self._slowly(func, types, args, kwargs)
        known = self._known.get(key)
        if known is None:
            result = self._slowly(func, types, args, kwargs)
            # With `out`, the result is no new tensor.
            self._known[key] = _recipe(func, result, args) if key[1] == _key(args) and "out" not in kwargs else _SLOW
            return result
        if known is _SLOW:
            return self._slowly(func, types, args, kwargs)
        recipes, pack = known
        result = pack([self._make(one, args) for one in recipes])
        if self.watcher is not None:
            self.watcher.count(func, args, kwargs, result)
        return result

    def _slowly(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        watcher, self.watcher = self.watcher, None  # an operator may decompose into others, which come back here
        try:
            result = super().dispatch(func, types, args, kwargs)
        finally:
            self.watcher = watcher
        if watcher is not None and result is not NotImplemented:
            watcher.after_operator(func, args, kwargs, result)
        return result

    def _make(self, recipe: _OutputRecipe, args: Sequence[Any]) -> Any:
        if recipe.shape is None:
            return args[recipe.of]
        if recipe.of < 0:
            meta = torch.empty_strided(recipe.shape, recipe.stride, dtype=recipe.dtype, device="meta")
            if self.watcher is not None:
                self.watcher.track_storage(meta.untyped_storage())
        else:
            meta = torch.empty(0, dtype=recipe.dtype, device="meta")
            meta.set_(args[recipe.of].untyped_storage(), recipe.offset, recipe.shape, recipe.stride)
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
            raise _UncacheableError
        return value.shape, value.stride(), value.dtype, value.storage_offset()
    if kind in _PLAIN:
        return kind, value
    raise _UncacheableError


def _recipe(func: Any, result: Any, args: Sequence[Any]) -> Any:
    """How to make this result from these arguments; _SLOW where torch has to."""
    pack: Callable[[list[Any]], Any]
    if func is torch.ops.aten.lift_fresh.default:
        return _SLOW  # returns its argument, which is new to the observer
    if result is None:
        return (), lambda values: None
    if isinstance(result, Tensor):
        outputs, pack = [result], lambda values: values[0]
    elif type(result) in (tuple, list) and all(isinstance(one, Tensor) for one in result):
        outputs, pack = list(result), type(result)
    else:
        return _SLOW
    storages = [id(arg.untyped_storage()) if isinstance(arg, Tensor) else None for arg in args]
    recipes, fresh = [], set()
    for out in outputs:
        if type(out) is not FakeTensor or out.fake_device != CPU or out.constant is not None:
            return _SLOW
        storage = out.untyped_storage()
        same = next((place for place, arg in enumerate(args) if arg is out), None)
        if same is not None:
            recipes.append(_OutputRecipe(same, None, (), out.dtype, 0))
        elif id(storage) in storages:
            recipes.append(
                _OutputRecipe(storages.index(id(storage)), tuple(out.shape), out.stride(), out.dtype, int(out.storage_offset()))
            )
        elif id(storage) in fresh or out.storage_offset() or storage.nbytes() != _span(out):
            return _SLOW
        else:
            fresh.add(id(storage))
            recipes.append(_OutputRecipe(-1, tuple(out.shape), out.stride(), out.dtype, 0))
    return tuple(recipes), pack


def _span(tensor: Tensor) -> int:
    """Bytes of a storage of its own."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.dtype.itemsize
