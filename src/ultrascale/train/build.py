"""Builds the engine of one rank from a job and a layout; `_chunk` has the order in which techniques are applied."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ultrascale.cost import communication
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.hardware import ClusterRates, Workload
from ultrascale.cost.stages import chunk_layers
from ultrascale.kernels import autotune, compile, delta_rule, float8, fused, loss, selection, split_master
from ultrascale.kernels.deferred import DeferredWeightGrads
from ultrascale.kernels.selection import Kernels
from ultrascale.model import adapters
from ultrascale.model.moe import Router
from ultrascale.model.transformer import Transformer, copy_of_embedding, full_weight
from ultrascale.parallel import context, expert, fused_block, recompute, tensor, vocab_loss, zero
from ultrascale.parallel.data import BucketedGrads, DDPGrads, GradientReducer, SingleMicrobatchGrads
from ultrascale.parallel.float8_block import TensorParallelFloat8Block
from ultrascale.parallel.mesh import Mesh, Shard
from ultrascale.parallel.pipeline import Pipeline, StageChunk
from ultrascale.parallel.torch_private import unset_fake_temporarily
from ultrascale.parallel.vocab_loss import VocabParallelFloat8Head
from ultrascale.parallel.zero import Float8GatherScales
from ultrascale.schedules import DEFAULT_SCHEDULE, ActionKind, Schedule
from ultrascale.schedules import build as build_schedule
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import ExpertOverlap, Training
from ultrascale.train import mup
from ultrascale.train.balance import bias_name
from ultrascale.train.data import Batches
from ultrascale.train.engine import Engine
from ultrascale.train.optimizer import Weight
from ultrascale.train.supported import why_not_gathered_in_fp8

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def schedule_of(layout: Layout) -> Schedule:
    """The pipeline schedule; with pp=1, 1F1B on one rank: micro-batches one after the other."""
    name, virtual = (layout.schedule, layout.virtual_stages) if layout.pp > 1 else (DEFAULT_SCHEDULE, 1)
    return build_schedule(name, layout.pp, layout.gas, virtual)


def build_engine(job: Job, mesh: Mesh, training: Training, batches: Batches) -> Engine:
    layout, dtype, device = mesh.layout, compute_format(job, mesh), mesh.device
    # Autotuned before the model is built, while there is free memory for it.
    attention = None if training.document_mask else autotune.fastest_attention(job, layout, dtype, device)
    mlp = autotune.fastest_mlp(job, layout, training, dtype, device)
    own = selection.choose(job, layout, training, device.type)
    rule = autotune.check_delta_rule(job, layout, dtype, device) if own.delta_rule else None
    if rule is not None and not rule.is_right:
        own = replace(own, delta_rule=False)
    autotuned = tuple(found for found in (attention, mlp, rule) if found is not None)
    schedule = schedule_of(layout)
    ends = [0, *accumulate(chunk_layers(job, schedule.ranks, schedule.virtual_stages))]
    chunks, weights, routers = [], list[Weight](), dict[int, Router]()
    frozen = list[Weight]()
    for stage in schedule.stages_of(mesh.pp.rank):
        layers = range(ends[stage], ends[stage + 1])
        chunk, chunk_weights, chunk_routers = _chunk(job, mesh, training, schedule, stage, layers, own)
        chunks.append(chunk)
        weights += [weight for weight in chunk_weights if not weight.frozen]
        frozen += [weight for weight in chunk_weights if weight.frozen]
        routers |= chunk_routers
    modules = [chunk.gradients.module for chunk in chunks]
    for times in (attention, mlp):
        if times is not None:
            times.apply(modules)
    scales = None
    if why_not_gathered_in_fp8(job, layout, training) is None:
        groups = [group for module in modules for group in float8.weights(module)]
        scales = Float8GatherScales(groups, mesh.shard, dtype, device) if groups else None
    losses = 1 + (training.z_loss > 0) + (job.model.mtp_depth > 0)
    pipeline = Pipeline(chunks, schedule, mesh, boundary_shape(job, layout), dtype, scales, losses)
    return Engine(job, mesh, training, batches, pipeline, weights, frozen, routers, own, autotuned)


def compute_format(job: Job, mesh: Mesh) -> torch.dtype:
    """The dtype of weights and activations. fp8 applies only to GEMM operands: the rest is bf16 on a GPU, fp32 on a CPU."""
    if job.precision == "fp8":
        return torch.bfloat16 if mesh.device.type == "cuda" else torch.float32
    return COMPUTE[job.precision]


def boundary_shape(job: Job, layout: Layout) -> tuple[int, int, int]:
    """The shape of activations sent between pipeline stages."""
    sequence_ranks = layout.tp if layout.sequence_parallel else 1
    return layout.mbs, job.seq // layout.cp // sequence_ranks, job.model.hidden


def _chunk(
    job: Job, mesh: Mesh, training: Training, schedule: Schedule, stage: int, layers: range, own: Kernels
) -> tuple[StageChunk, list[Weight], dict[int, Router]]:
    layout, compute = mesh.layout, compute_format(job, mesh)
    reduce = torch.float32 if job.gradients == "fp32" or job.precision == "fp32" else compute
    sharded = layout.zero > 0 and mesh.shard.size > 1
    deferred = DeferredWeightGrads(used=any(action.kind is ActionKind.W for action in schedule.actions[mesh.pp.rank]))
    # A rehearsal (measure/rehearse/) uses fake tensors that pretend to have memory: tensors on the meta device need none.
    with unset_fake_temporarily():
        with torch.device("meta"):
            module = Transformer(job.model, layers, embed=stage == 0, head=stage == schedule.stages - 1)
            if job.adapter_rank is not None:
                adapters.attach(module, job.adapter_rank, job.adapter_targets, training.adapter_alpha)
                for parameter in module.parameters():
                    if not parameter.requires_grad:  # without an fp32 master
                        parameter.data = parameter.data.to(compute)
                module.tie()
        shards = tensor.apply(module, mesh, deferred)  # first: the other techniques read this rank's sizes
        expert.apply(module, mesh, shards, expert_overlap(job, layout, training, mesh.device.type))
        context.apply(module, mesh.cp, layout.context_parallel, job.seq)
        if own.fused and mesh.tp.size > 1:
            fused_block.apply(module, mesh.tp, deferred, training.tp_chunks, layout.sequence_parallel)
        elif own.fused:
            fused.apply(module, deferred)
        if own.delta_rule:
            delta_rule.apply(module)
        if own.loss and mesh.tp.size > 1:
            vocab_loss.apply(module, mesh.tp, layout.sequence_parallel)
        elif own.loss:
            loss.apply(module)
        if module.head is not None:
            module.head.criterion.z_loss = training.z_loss
            module.head.mtp_weight = training.mtp_weight / max(1, job.model.mtp_depth)
        if job.precision == "fp8":
            forms = (TensorParallelFloat8Block, VocabParallelFloat8Head) if mesh.tp.size > 1 else ()
            float8.apply(module, training.fp8_scaling, training.fp8_keep, mesh.device, *forms)
        # Inside the modules that ZeRO gathers, so that parameters are gathered during recomputation.
        recompute.apply(module, layout.recompute, layout.recompute_layers, own.compiled)
        if own.compiled:
            compile.apply(module, layout.recompute)
        if sharded:
            zero.apply(module, mesh, shards, compute, reduce)
        else:
            module.to(compute)
    module.to_empty(device="cpu" if sharded and layout.offload == "parameters" else mesh.device)
    if own.fused and not sharded:
        fused.join(module)
    elif own.fused and job.precision != "fp8":  # whose gathered weights are joined as they are cast
        zero.gather_joined(module, mesh.shard.size, compute)
    if sharded and own.adamw and mesh.device.type == "cuda":
        zero.cast_by_triton(module)
    gradients: GradientReducer
    if sharded:
        gradients = zero.FSDPGrads(module, mesh, training.reduce_every_microbatch)
    elif own.single_microbatch:
        gradients = SingleMicrobatchGrads(module)
    elif layout.data_parallel == "ddp" and mesh.data.size > 1:
        gradients = DDPGrads(module, mesh.data, training.bucket_mb, training.reduce_every_microbatch)
    else:
        experts = [parameter for mlp in module.moe_layers().values() for parameter in mlp.experts.parameters()]
        gradients = BucketedGrads(
            module,
            mesh.data,
            "bucketed" if layout.data_parallel == "ddp" else layout.data_parallel,
            reduce,
            training.bucket_mb,
            training.compress,
            training.reduce_every_microbatch,
            experts if mesh.ep.size > 1 else (),
            mesh.expert_data,
        )
    weights = [
        _weight(name, parameter, shards[name], gradients, job, mesh, training, own)
        for name, parameter in module.named_parameters()
    ]
    weights += [
        _bias(layer, router, job, mesh, training, own) for layer, router in module.routers().items() if router.moe.router_bias
    ]
    return StageChunk(stage, gradients, deferred), weights, module.routers()


@torch.no_grad()
def _weight(
    name: str,
    parameter: nn.Parameter,
    shard: Shard,
    gradients: GradientReducer,
    job: Job,
    mesh: Mesh,
    training: Training,
    own: Kernels,
) -> Weight:
    """Initializes a parameter and creates its fp32 master."""
    shard = _with_zero_axes(shard, isinstance(parameter, DTensor), mesh)
    part = shard.piece(full_weight(name, torch.Size(shard.shape), training.seed, job.model, mesh.device))
    if (scale := mup.init_scale(shard, job, training)) != 1:
        part = part * scale
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
    local.copy_(part)
    host = mesh.layout.offload == "optimizer"
    if not parameter.requires_grad and job.adapter_rank is not None:
        return Weight(shard, parameter, local, local, gradients, frozen=True)
    if local.dtype == torch.bfloat16 and own.adamw:
        upper, master = split_master.split(part.float())
        local.copy_(upper)
    elif local.dtype == torch.float32 and not host:
        master = local
    else:
        master = part.to("cpu" if host else local.device, torch.float32, copy=True)
    shard = replace(shard, is_primary=shard.is_primary and name != copy_of_embedding(job.model))
    return Weight(shard, parameter, local, master, gradients)


def _with_zero_axes(shard: Shard, sharded: bool, mesh: Mesh) -> Shard:
    """The shard with the ranks over which ZeRO shards it further, and those that hold a copy of it."""
    is_expert = shard.rows is not None
    if sharded:
        return replace(shard, pieces=mesh.expert_shard if is_expert else mesh.shard, copies=mesh.replica)
    if mesh.layout.zero:
        return replace(shard, copies=mesh.data)
    # Only one rank of the ep axis counts replicated parameters, so that the norm can be summed over ep for all parameters.
    return replace(shard, copies=mesh.expert_data, is_primary=shard.is_primary and (is_expert or mesh.ep.rank == 0))


def _bias(layer: int, router: Router, job: Job, mesh: Mesh, training: Training, own: Kernels) -> Weight:
    """A router's bias, replicated in fp32 on every rank: saved with the weights, but updated by loads instead of gradients."""
    name, shape = bias_name(layer), (router.moe.experts,)
    router.bias = full_weight(name, torch.Size(shape), training.seed, job.model, mesh.device)
    parameter = nn.Parameter(router.bias, requires_grad=False)
    shard = Shard(name, shape, is_primary=mesh.tp.rank == 0)
    return _weight(name, parameter, shard, SingleMicrobatchGrads(router), job, mesh, training, own)


def expert_overlap(job: Job, layout: Layout, training: Training, device: str) -> ExpertOverlap:
    """What experts compute during the all-to-all; `auto` follows the cost model (cost/communication.py)."""
    if training.expert_overlap != "auto":
        return training.expert_overlap
    if device != "cuda" or layout.ep == 1 or job.model.moe is None:
        return "none"
    engine = job.changed(framework=Framework.load("ultrascale"))
    first = communication.local_tokens_first(Workload(engine, LayoutColumns.of([layout]), ClusterRates(engine)))[0]
    return "rows" if first else "gradients"
