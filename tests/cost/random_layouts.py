"""Random legal layouts of real models on real clusters, by seed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from random import Random
from typing import Any

from builders import make_job
from ultrascale.cost.legality import problem
from ultrascale.schedules import REGISTRY
from ultrascale.specs.errors import divisors
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout

# model, cluster, sequence, sequences in a batch, further fields of the job
JOBS: tuple[tuple[str, str, int, int, dict[str, Any]], ...] = (
    ("llama-3-8b", "64xh100", 8192, 256, {}),
    ("llama-3-70b", "128xh100", 8192, 256, {"gradients": "bf16"}),
    ("llama-3.1-405b", "512xh200", 8192, 256, {}),
    ("gpt3-175b", "64xa100-80gb", 2048, 192, {"attention": "plain", "dropout": True}),
    ("llama-3.2-1b", "16xa100-80gb", 32768, 32, {}),
    ("qwen3-8b", "16xb200", 4096, 96, {"precision": "fp8"}),
    ("mixtral-8x7b", "64xh100", 4096, 256, {}),
    ("qwen3-30b-a3b", "32xh100", 4096, 256, {"optimizer": "adamw-8bit"}),
    ("deepseek-v2-lite", "32xh200", 4096, 128, {}),
    ("deepseek-v3", "256xh100", 4096, 512, {}),
    ("smollm2-360m", "8xv100", 2048, 64, {"precision": "fp16"}),
)


def job_of(index: int) -> Job:
    model, cluster, seq, sequences, fields = JOBS[index]
    return make_job(model, cluster, seq, sequences, **fields)


def from_choices(job: Job, choose: Any) -> Layout | None:
    """A layout drawn field by field with `choose(list)`; None when the draw ends nowhere legal."""
    model, world = job.model, job.cluster.gpus
    tp = choose([d for d in divisors(world) if d <= 16 and model.heads % d == 0])
    pp = choose([d for d in divisors(world // tp) if d <= min(model.layers, 32)])
    cp = choose([d for d in divisors(world // (tp * pp)) if d <= 8])
    dp = world // (tp * pp * cp)
    if job.sequences % dp:
        return None
    mbs = choose([d for d in divisors(job.sequences // dp) if d <= 8])
    zero = choose([0, 1, 2, 3])
    schedule, loops = "1f1b", 1
    if pp > 1:
        spec = REGISTRY[choose(list(REGISTRY))]
        schedule = spec.name
        loops = choose([v for v in (1, 2, 3, 4) if spec.takes(v)])
    layout = Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        ep=choose([d for d in divisors(model.moe.experts if model.moe else 1) if (dp * cp) % d == 0]),
        zero=zero,
        zero_shards=choose([None, *(d for d in divisors(dp * cp) if 1 < d < dp * cp)]) if zero else None,
        keep_gathered=zero == 3 and choose([False, True]),
        sequence_parallel=choose([True, True, False]),
        data_parallel=choose(["bucketed", "bucketed", "hooks", "naive"]),
        context_parallel=choose(["zigzag", "ring", "allgather", "ulysses"]),
        schedule=schedule,
        virtual_stages=loops,
        mbs=mbs,
        gas=job.sequences // (dp * mbs),
        recompute=choose(["none", "selective", "full"]),
        offload=choose(["none", "none", "none", "optimizer", *(["parameters"] if zero == 3 else [])]),
    )
    return layout if problem(job, layout) is None else None


def layouts_of(index: int, count: int, seed: int, wanted: Callable[[Layout], bool] = lambda _: True) -> list[Layout]:
    """`count` layouts of one job that are wanted; fewer where they are rare."""
    job, rng = job_of(index), Random(seed)
    drawn = (from_choices(job, rng.choice) for _ in range(500 * count))
    return list(islice((layout for layout in drawn if layout is not None and wanted(layout)), count))


def sample(count: int, seed: int) -> list[tuple[Job, list[Layout]]]:
    """`count` layouts of each job."""
    return [(job_of(index), layouts_of(index, count, seed + index)) for index in range(len(JOBS))]
