"""From a job and a layout to an engine on this rank. The order in which techniques are applied stands in `_chunk`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ultrascale.cost.stages import chunk_layers
from ultrascale.model.init import full_weight
from ultrascale.model.transformer import Transformer
from ultrascale.parallel import context, tensor, zero
from ultrascale.parallel.data import Gradients, Reduced, TorchDDP
from ultrascale.parallel.mesh import Mesh
from ultrascale.parallel.pipeline import Chunk, Pipeline
from ultrascale.parallel.products import Later
from ultrascale.parallel.shards import Shard
from ultrascale.schedules import Kind, Schedule
from ultrascale.schedules import build as build_schedule
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training
from ultrascale.train import compile, recompute
from ultrascale.train.optimizer import Weight

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Built:
    pipeline: Pipeline
    weights: list[Weight]


def schedule_of(layout: Layout) -> Schedule:
    """What the pipeline runs; one rank alone takes its micro-batches one after the other."""
    name, virtual = (layout.schedule, layout.virtual_stages) if layout.pp > 1 else ("1f1b", 1)
    return build_schedule(name, layout.pp, layout.gas, virtual)


def build(job: Job, mesh: Mesh, training: Training) -> Built:
    layout = mesh.layout
    schedule = schedule_of(layout)
    counts = chunk_layers(job, schedule.ranks, schedule.virtual_stages)
    ends = [0, *accumulate(counts)]
    chunks, weights = [], []
    for stage in schedule.stages_of(mesh.pp.rank):
        layers = range(ends[stage], ends[stage + 1])
        chunk, held = _chunk(job, mesh, training, schedule, stage, layers)
        chunks.append(chunk)
        weights += held
    dtype = COMPUTE[job.precision]
    return Built(Pipeline(chunks, schedule, mesh, boundary_shape(job, layout), dtype), weights)


def boundary_shape(job: Job, layout: Layout) -> tuple[int, int, int]:
    """Of what travels between pipeline stages."""
    cut = layout.tp if layout.sequence_parallel else 1
    return layout.mbs, job.seq // layout.cp // cut, job.model.hidden


def _chunk(
    job: Job, mesh: Mesh, training: Training, schedule: Schedule, stage: int, layers: range
) -> tuple[Chunk, list[Weight]]:
    layout, compute = mesh.layout, COMPUTE[job.precision]
    reduce = torch.float32 if job.gradients == "fp32" or job.precision == "fp32" else compute
    sharded = layout.zero > 0 and mesh.shard.size > 1
    later = Later(used=any(action.kind is Kind.W for action in schedule.actions[mesh.pp.rank]))
    with torch.device("meta"):
        module = Transformer(job.model, layers, embed=stage == 0, head=stage == schedule.stages - 1)
    shards = tensor.apply(module, mesh, later)  # first: the others see this rank's sizes
    context.apply(module, mesh.cp, layout.context_parallel, job.seq)
    recompute.apply(module, layout.recompute)  # inside what ZeRO gathers, so that recomputing finds it gathered
    if mesh.device.type == "cuda" and mesh.tp.size == mesh.cp.size == 1 and not later.used:
        compile.apply(module)
    if sharded:
        zero.apply(module, mesh, compute, reduce)
    else:
        module.to(compute)
    module.to_empty(device="cpu" if sharded and layout.offload == "parameters" else mesh.device)
    gradients: Gradients
    if sharded:
        gradients = zero.Sharded(module, mesh, training.reduce_every_microbatch)
    elif layout.data_parallel == "ddp" and mesh.data.size > 1:
        gradients = TorchDDP(module, mesh.data, training.bucket_mb, training.reduce_every_microbatch)
    else:
        gradients = Reduced(
            module,
            mesh.data,
            "bucketed" if layout.data_parallel == "ddp" else layout.data_parallel,
            reduce,
            training.bucket_mb,
            training.compress,
            training.reduce_every_microbatch,
        )
    weights = [
        _weight(name, parameter, shards[name], gradients, job, mesh, training) for name, parameter in module.named_parameters()
    ]
    return Chunk(stage, gradients, later), weights


@torch.no_grad()
def _weight(
    name: str, parameter: nn.Parameter, shard: Shard, gradients: Gradients, job: Job, mesh: Mesh, training: Training
) -> Weight:
    """Fills a parameter with its initial values and makes its master."""
    whole = full_weight(name, torch.Size(shard.shape), training.seed, job.model, mesh.device)
    part = shard.of(whole)
    offsets = [shard.start if dim == shard.dim else 0 for dim in range(len(shard.shape))]
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        pieces = part.chunk(mesh.shard.size)
        offsets[0] += sum(len(piece) for piece in pieces[: mesh.shard.rank])
        part = pieces[mesh.shard.rank] if mesh.shard.rank < len(pieces) else part[:0]
    else:
        local = parameter.data
    local.copy_(part)
    host = mesh.layout.offload == "optimizer"
    master = (
        local
        if local.dtype == torch.float32 and not host
        else part.to("cpu" if host else local.device, torch.float32, copy=True)
    )
    # A tied head on a stage of its own is a second copy of the embedding.
    copy_of_embedding = name == "head.linear.weight" and job.model.tied_embeddings
    counted = shard.counted and not copy_of_embedding
    return Weight(shard, parameter, local, master, gradients, tuple(offsets), counted)
