"""Names of torch that are not public, each with the reason why it is needed.

Nothing else imports or reads a private name of torch; tests/parallel/test_torch_private.py fails when one changes. Exceptions
are `torch._scaled_mm` (kernels/float8_gemm.py) and the names of ATen operators in policies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    FakeWork,
    OpType,
    PrefixStore,
    ReduceScatterOptions,
    Store,
    TCPStore,
)
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.autograd import profiler
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version_counter
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.distributed_c10d import _coalescing_manager as coalescing_manager
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DataDependentOutputException",  # a value, or a shape that depends on one, which a tensor without memory does not have
    "DynamicOutputShapeException",
    "FakeTensor",  # tensors without memory, for rehearsals
    "FakeTensorMode",
    "PrefixStore",  # torch.distributed has the stores too, but does not declare them to type checkers
    "ShardingPropagator",  # runs operators for their shapes, which a rehearsal does not count
    "StorageInfo",  # the place of a tensor in a checkpoint's files; its own writer has to return it
    "Store",
    "TCPStore",
    "TorchDispatchMode",  # sees every operator: live memory, selective recomputation, rehearsals
    "coalescing_manager",  # several collectives in one call, which rehearsals of other programs take apart
    "in_kernel_invocation_manager",
    "unset_fake_temporarily",
]

# Many small tensors in one kernel; torch.optim and clip_grad_norm_ use the same functions.
foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_
foreach_copy_ = torch._foreach_copy_


# The allocator's events, with stacks: the file that pytorch.org/memory_viz shows has no public writer.
record_memory_history = torch.cuda.memory._record_memory_history
memory_snapshot = torch.cuda.memory._snapshot

SHARDING_PROPAGATION = ("propagate_op_sharding_non_cached", "_propagate_tensor_meta_non_cached")

# Ends a functional collective and returns its argument; for tensors without memory, torch allocates a copy.
wait_tensor = torch.ops._c10d_functional.wait_tensor.default

# An all-gather of several tensors in one call.
all_gather_coalesced = torch.ops.c10d.allgather_into_tensor_coalesced_.default

# A fake tensor without the checks of its constructor, which take as long as an operator.
make_subclass = Tensor._make_subclass


def fake_store() -> Store:
    """A store for a process group without peers, for rehearsals. The import registers its backend, `fake`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def finished_work() -> Any:
    """What an operator of c10d returns: nothing to wait for."""
    return FakeWork().boxed()


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group that a functional collective names."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]


def foreach_on_cpu() -> None:
    """Optimizers use their multi-tensor kernels on a CPU and without memory too, as they do on a GPU by default."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    def devices() -> list[str]:
        return ["cpu", "cuda"]

    for module in (_foreach_utils, optimizer):
        module._get_foreach_kernels_supported_devices = devices  # type: ignore[attr-defined]
    optimizer._foreach_supported_types.append(FakeTensor)


@cache
def fused_rms_norm_on_cpu() -> torch.library.Library:
    """torch's RMSNorm is one operator on a CPU too, as on a GPU: it saves its input and a number for each row.

    A CPU would run several, which save copies in fp32. The registration lasts as long as the result, which is kept.
    """
    from torch._decomp import decomposition_table

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for packet in (torch.ops.aten._fused_rms_norm, torch.ops.aten._fused_rms_norm_backward):
        library.impl(packet.default, decomposition_table[packet.default], "CPU")  # type: ignore[no-untyped-call]
    return library


def all_gather_into(whole: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Asynchronous. The public function spends another 4 to 7 µs on checks and a log (torch 2.13, `fake` group)."""
    options = AllgatherOptions()
    options.asyncOp = True
    assert group is not None
    return group._allgather_base(whole, own, options)


def reduce_scatter_into(own: Tensor, parts: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """The same; sums."""
    options = ReduceScatterOptions()
    options.asyncOp = True
    assert group is not None
    return group._reduce_scatter_base(own, parts, options)


def in_backward() -> bool:
    """Whether autograd runs in this thread: a forward hook that is called then sees a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_profiling() -> bool:
    """Whether a profiler records: opening a range costs 10 µs even if none does."""
    return profiler._is_profiler_enabled


def op_name(work: dist.Work) -> str:
    """The name of a pending operation, such as ALLREDUCE: gloo's Work has no public one."""
    number = int(work._get_op_type())  # type: ignore[attr-defined]
    return next((name for name, kind in OpType.__members__.items() if int(kind) == number), "UNKNOWN")


def local_tensor(tensor: nn.Parameter) -> Tensor:
    """The local tensor of a DTensor itself, not the view that to_local() returns: FSDP2 reads the gather hooks from it."""
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


def prepare_ddp_backward(ddp: nn.parallel.DistributedDataParallel) -> None:
    """Makes the next backward reduce. DDP does this in a forward; a pipeline decides it between forward and backward."""
    # DDP rebuilds its buckets in the forward after the first reduction; here another reduction may run before that.
    ddp.reducer._rebuild_buckets()
    ddp.reducer.prepare_for_backward([])


def step_microbatches(
    schedule: Any, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, **options: Any
) -> None:
    """A pipeline step with lists of micro-batches, which `step` of torch 2.13 does not take; torchtitan 0.3 gives them."""
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    for stage in stages:
        stage.has_backward = schedule._has_backward
        stage.clear_runtime_states()
    schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, **options)


def exchange_pipeline_shapes(receive: Callable[[Any, int], Any], send: Callable[[Any, Any, int], None]) -> None:
    """Stages built without shapes get them from `receive(stage, source)` and hand theirs to `send(stage, shapes, destination)`.

    torch 2.13 asks the ranks of neighbouring stages before the first step, and all ranks whether their stages have shapes:
    here the stages of this rank answer for all.
    """
    from torch.distributed.pipelining import PipelineStage, _utils, schedules

    def warm_up(_: Any, stages: Sequence[Any], has_backward: bool, done: bool) -> None:
        modes = _utils.InferenceMode
        known = [one for one in stages if isinstance(one, PipelineStage)]
        asks = any(modes.needs_dynamic(one._user_meta, has_backward) for one in known)
        for one in known:
            one._inference_mode = modes.DYNAMIC if asks else modes.STATIC

    PipelineStage._recv_meta = receive  # type: ignore[method-assign,assignment]
    PipelineStage._send_meta = send  # type: ignore[method-assign,assignment]
    schedules._PipelineSchedule._warmup_p2p = warm_up  # type: ignore[method-assign,assignment]


def rank_of_pipeline_stage(stage: Any, index: int) -> int:
    """The global rank that has the stage of this index, in the pipeline of a PipelineStage."""
    return int(stage._resolve_peer_global_rank(index))


def shapes_of_gradients(stage: Any) -> Any:
    """What the next stage of torch's pipelines sends back: gradients like the outputs, with no sums left to reduce."""
    from torch.distributed.pipelining import _utils
    from torch.distributed.tensor import Replicate

    def gradient(output: Any) -> Any:
        if not output.requires_grad:
            return None
        found = dataclasses.replace(output, requires_grad=False)
        if not isinstance(found, _utils._DTensorMeta):
            return found
        placements = tuple(Replicate() if one.is_partial() else one for one in found.placements)
        return dataclasses.replace(found, placements=placements)

    return _utils._StageBackwardMeta(tuple(map(gradient, stage._stage_meta.outputs)))


def fsdp_param_groups(module: nn.Module) -> Iterator[Any]:
    """FSDP2's parameter groups of a root module: their shards, gathered parameters and unreduced gradients."""
    for state in _fsdp_state(module)._state_ctx.all_states:
        yield from _state_groups(state)


def fsdp_begin_step(module: nn.Module) -> None:
    """Forgets the order of earlier forwards, including an evaluation's: FSDP2 prefetches in backward in that order."""
    _post_forward_order(module).clear()
    for group in fsdp_param_groups(module):
        group._post_forward_indices.clear()


def fsdp_no_prefetch_beyond_first(module: nn.Module) -> None:
    """Nothing precedes the first layer of a forward: after several forwards FSDP2 would prefetch the last layer of another."""
    for first in _post_forward_order(module)[:1]:
        first._post_forward_indices = [0] * len(first._post_forward_indices)


def fsdp_unreduced(group: Any) -> Tensor | None:
    """HSDP: the reduce-scattered gradients of a group that are not yet all-reduced over replicas."""
    found: Tensor | None = group._partial_reduce_output
    return found


def fsdp_gathered_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The gathered parameters that exist: torch creates them in the first gather."""
    parameters = (parameter for group in fsdp_param_groups(module) for parameter in group.fsdp_params)
    return [parameter.unsharded_param for parameter in parameters if hasattr(parameter, "_unsharded_param")]


def fsdp_kept_gradients(kept: Callable[[Tensor], Any]) -> None:
    """Calls `kept` with each whole gradient that FSDP2 keeps for the next micro-batch."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    plain = FSDPParam.to_accumulated_grad_if_needed

    def outer(self: FSDPParam) -> None:
        plain(self)
        found = self._unsharded_param.grad if self.unsharded_accumulated_grad is None else self.unsharded_accumulated_grad
        if found is not None:
            kept(found)

    FSDPParam.to_accumulated_grad_if_needed = outer  # type: ignore[method-assign]


def fsdp_copy_in(copy_in: Callable[[Sequence[Tensor], Tensor], bool]) -> None:
    """Replaces FSDP2's copy of gradients into the input of a reduce-scatter, [ranks, n], where `copy_in` returns True."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    plain = getattr(collectives.foreach_reduce_scatter_copy_in, "plain", collectives.foreach_reduce_scatter_copy_in)

    def outer(gradients: list[Tensor], out: Tensor, ranks: int) -> None:
        if not copy_in(gradients, out.view(ranks, -1)):
            plain(gradients, out, ranks)

    outer.plain = plain  # type: ignore[attr-defined]
    collectives.foreach_reduce_scatter_copy_in = outer  # type: ignore[assignment]


def fsdp_gather_in_place(module: nn.Module, copy: Callable[[list[Tensor], list[Tensor]], Any]) -> None:
    """Makes FSDP2 gather each weight of the module straight into its own memory, all of a group in one call.

    `copy` casts shards (the second argument) into this rank's parts of the gathered weights (the first).

    FSDP2 gathers a group into one buffer, which it allocates beside the weights and copies to them. Here the weights' memory is
    allocated where the gather begins, which waits for the kernels that used it before.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    owner: Any = _fsdp_param_group
    for group in (group for one in module.modules() if isinstance(one, FSDPModule) for group in _fsdp_groups(one)):
        for parameter in group.fsdp_params:
            parameter.copy_shards = copy  # sharded by rows: shards in the order of ranks are the weight
    plain = getattr(owner.foreach_all_gather, "plain", owner.foreach_all_gather)
    plain_copy_out = getattr(owner.foreach_all_gather_copy_out, "plain", owner.foreach_all_gather_copy_out)

    def gather(parameters: list[Any], process_group: dist.ProcessGroup, *others: Any) -> Any:
        if not all(hasattr(parameter, "copy_shards") for parameter in parameters):
            return plain(parameters, process_group, *others)
        return _gather_in_place(parameters, process_group, *others)

    def copy_out(result: Any, parameters: list[Any], process_group: dist.ProcessGroup) -> None:
        if isinstance(result.all_gather_output, Tensor):
            plain_copy_out(result, parameters, process_group)
            return
        torch.get_device_module(parameters[0].device).current_stream().wait_event(result.all_gather_event)
        if result.all_gather_work is not None:
            result.all_gather_work.wait()

    gather.plain, copy_out.plain = plain, plain_copy_out  # type: ignore[attr-defined]
    owner.foreach_all_gather, owner.foreach_all_gather_copy_out = gather, copy_out


@torch.no_grad()
def _gather_in_place(
    parameters: list[Any], group: dist.ProcessGroup, async_op: bool, _: Any, stream: Any, device: torch.device, __: Any
) -> Any:
    """FSDP2's foreach_all_gather, with each weight's memory in the place of an output to copy out of."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult

    module, ranks = torch.get_device_module(device), group.size()
    shards, wholes = [], []
    for parameter in parameters:
        cast = hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
        own = parameter.all_gather_inputs if cast else [parameter._sharded_param_data]
        if not parameter.all_gather_outputs:
            dtypes = [one.dtype if cast else parameter.param_dtype or one.dtype for one in own]
            parameter.all_gather_outputs = [
                torch.empty(ranks * one.numel(), dtype=dtype, device=device) for one, dtype in zip(own, dtypes, strict=True)
            ]
        parameter.alloc_all_gather_outputs()
        shards += [one.flatten() for one in own]
        wholes += parameter.all_gather_outputs
    options = AllgatherOptions()
    options.asyncOp = async_op  # if not, NCCL uses `stream` itself
    stream.wait_stream(module.current_stream())
    with module.stream(stream), preserve_version_counter(tuple(wholes)):
        parts = [whole.chunk(ranks)[group.rank()] for whole in wholes]
        parameters[0].copy_shards(parts, shards)
        if len({whole.dtype for whole in wholes}) > 1:  # fp8 and bf16
            wholes, parts = ([one.view(torch.uint8) for one in some] for some in (wholes, parts))
        work = group.allgather_into_tensor_coalesced(wholes, parts, options)
        if not async_op and work is not None:  # NCCL returns none
            work.wait()
        event = stream.record_event()
    return AllGatherResult(wholes, event, work if async_op else None, [], [], [])  # type: ignore[arg-type]


def fsdp_gather_joined(module: nn.Module, weights: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
    """Makes FSDP2 gather these weights of one module into adjacent memory, which is allocated and freed as one.

    It copies gathered weights to tensors that it allocates in the first gather unless they exist. `dtype`: the gathered one.
    """
    found = {id(one.sharded_param): one for group in _fsdp_groups(module) for one in group.fsdp_params}
    sizes = [weight.numel() for weight in weights]
    whole = torch.empty(sum(sizes), dtype=dtype, device=weights[0].device)
    storage, size = whole.untyped_storage(), whole.nbytes

    def resize(size: int) -> None:
        if storage.size() != size:
            storage.resize_(size)

    for weight, part in zip(weights, torch.split(whole, sizes), strict=True):
        parameter = found[id(weight)]
        parameter.all_gather_outputs = [part]
        parameter._unsharded_param = nn.Parameter(part.view(weight.shape))
        parameter.alloc_all_gather_outputs = partial(resize, size)
        parameter.free_unsharded_param = partial(resize, 0)
    resize(0)


def fsdp_post_backward(module: nn.Module, first: Sequence[nn.Module]) -> None:
    """FSDP2's post-backward for gradients computed outside a backward; torch's pipelines call the same functions.

    Submodules of their own groups come `first`: FSDP2 keeps the input of the last reduce-scatter until the next.
    """
    groups = [group for one in first for group in _fsdp_groups(one)]
    groups += [group for group in fsdp_param_groups(module) if group not in groups]
    for group in groups:
        group.post_backward()
    _fsdp_state(module)._root_post_backward_final_callback()


def _fsdp_groups(module: nn.Module) -> list[Any]:
    """The parameter groups of one module, without its submodules'."""
    return _state_groups(_fsdp_state(module))


def _state_groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11


def _post_forward_order(module: nn.Module) -> list[Any]:
    """FSDP2's parameter groups in forward order; empty before the first forward."""
    return getattr(_fsdp_state(module)._comm_ctx, "post_forward_order", [])


def _fsdp_state(module: nn.Module) -> Any:
    return fully_shard.state(module)  # type: ignore[attr-defined]


def after_backward(callback: Any) -> None:
    """Calls back at the end of the backward that runs now, as torch's data-parallel wrappers do."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def compile_with_inductor(graph: Any, inputs: Any, compile_graph: Any) -> Any:
    """Inductor's decompositions and partition with another compiler of its graphs; inputs may be of any FakeTensorMode."""
    from torch._guards import TracingContext
    from torch._inductor.compile_fx import compile_fx

    mode = TracingContext.get().fake_mode
    assert mode is not None
    given = [mode.from_tensor(one, static_shapes=True) if isinstance(one, Tensor) else one for one in inputs]
    return compile_fx(graph, given, inner_compile=compile_graph)


def fused_operators() -> tuple[Callable[[Any], bool], Callable[[Any], bool]]:
    """Whether Inductor fuses a graph's node, and whether the node is a view, by the partitioner's lists of operators."""
    from torch._functorch.partitioners import get_default_op_list

    found = get_default_op_list()
    return found.is_fusible, found.is_view


def recompute_with_any_random_state() -> None:
    """A partition gives recomputed operators no random state of their first call: without values, none draws a number.

    torch 2.13 appends such states to what a graph saves after a DeviceMesh, and then takes the mesh for a tensor.
    """
    from torch._functorch import partitioners

    def unchanged(joint_module: Any, fw_module: Any, bw_module: Any, num_sym_nodes: int) -> tuple[Any, Any]:
        return fw_module, bw_module

    partitioners.functionalize_rng_ops = unchanged
