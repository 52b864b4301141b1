"""Plans to hand over: several models, layouts that use every technique, and some that no other engine can express."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from builders import make_job
from ultrascale.cost.estimate import estimate
from ultrascale.cost.legality import check, problem
from ultrascale.export import targets, write
from ultrascale.schedules import REGISTRY
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import divisors
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan

# model, cluster, sequence, sequences in a batch, fields of the job, fields of the layout
PLANS: dict[str, tuple[str, str, int, int, dict[str, Any], dict[str, Any]]] = {
    "one GPU": ("gpt2", "1xh100", 1024, 8, {}, {"mbs": 4, "gas": 2}),
    "dense": (
        "llama-3-70b",
        "64xh100",
        8192,
        512,
        {"total_tokens": 10**12},
        {"dp": 4, "tp": 8, "pp": 2, "zero": 1, "gas": 128, "schedule": "interleaved", "virtual_stages": 4},
    ),
    "sharded": (
        "llama-3.1-8b",
        "16xh100",
        8192,
        64,
        {},
        {"dp": 16, "zero": 3, "zero_shards": 8, "gas": 4, "recompute": "full"},
    ),
    "long": (
        "llama-3.2-1b",
        "16xh200",
        65536,
        16,
        {"gradients": "bf16"},
        {"dp": 2, "tp": 2, "cp": 4, "zero": 2, "gas": 8, "recompute": "selective", "context_parallel": "zigzag"},
    ),
    "experts": (
        "mixtral-8x7b",
        "64xh100",
        4096,
        256,
        {},
        {"dp": 16, "tp": 2, "pp": 2, "ep": 8, "zero": 1, "gas": 16, "schedule": "1f1b"},
    ),
    "qwen": ("qwen3-30b-a3b", "32xh100", 4096, 128, {"precision": "fp8"}, {"dp": 32, "ep": 16, "zero": 3, "gas": 4}),
    "latent": ("deepseek-v3", "256xh100", 4096, 512, {}, {"dp": 16, "tp": 2, "pp": 8, "ep": 32, "zero": 1, "gas": 32}),
    "no bubble": (
        "qwen3-8b",
        "16xb200",
        4096,
        96,
        {"optimizer": "adamw-8bit"},
        {"dp": 2, "tp": 2, "pp": 4, "schedule": "zb-v", "virtual_stages": 2, "gas": 24, "mbs": 2, "sequence_parallel": False},
    ),
    "tied": (
        "smollm2-360m",
        "8xh100",
        2048,
        64,
        {"precision": "fp32"},
        {"dp": 8, "mbs": 4, "gas": 2, "data_parallel": "naive"},
    ),
}


@cache
def plan_of(name: str) -> Plan:
    model, cluster, seq, sequences, job_fields, layout_fields = PLANS[name]
    return planned(make_job(model, cluster, seq, sequences, **job_fields), Layout(**layout_fields))


def planned(job: Job, layout: Layout) -> Plan:
    check(job, layout)
    return Plan(job=job, layout=layout, estimate=estimate(job, layout))


def exported(plan: Plan, to: str, folder: Path, style: str | None = None) -> Path:
    """The folder that `ultrascale export` writes."""
    if to in targets.LAUNCHERS:
        files, _ = targets.launcher_files(plan, to, None, str(folder))
    else:
        files = targets.engine_files(plan, to, style, str(folder)).files
    write.into(folder, files, force=False)
    return folder


MODELS = ("llama-3-8b", "llama-3.2-1b", "gpt2", "qwen3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "nemotron-8b")


def random_plan(seed: int) -> tuple[Job, Layout]:
    """A legal layout of some model, drawn field by field; everything that a layout can say comes up."""
    rng = Random(seed)
    while True:
        model = Model.load(rng.choice(MODELS))
        world = rng.choice([1, 2, 8, 16, 64])
        seq, sequences = rng.choice([512, 1024]), rng.choice([64, 96, 128])
        job = Job(
            model=model,
            cluster=Cluster.load(f"{world}x{rng.choice(['h100', 'b200', 'h200'])}"),
            seq=seq,
            batch_tokens=seq * sequences,
            precision=rng.choice(["bf16", "bf16", "fp8", "fp32", "fp16"]),
            gradients=rng.choice(["fp32", "bf16"]),
            optimizer=rng.choice(["adamw", "adamw", "adamw-bf16", "adamw-8bit", "muon", "sgd-momentum", "sgd"]),
            attention=rng.choice(["flash", "plain"]),
            dropout=rng.choice([False, True]),
            total_tokens=rng.choice([None, 10**9 + 7]),
        )
        layout = _layout(rng, job, world)
        if layout is not None and problem(job, layout) is None:
            return job, layout


def _layout(rng: Random, job: Job, world: int) -> Layout | None:
    tp = rng.choice([d for d in divisors(world) if d <= 8])
    pp = rng.choice([d for d in divisors(world // tp) if d <= 4])
    cp = rng.choice([d for d in divisors(world // tp // pp) if d <= 4])
    dp = world // tp // pp // cp
    if job.sequences % dp:
        return None
    mbs = rng.choice([d for d in divisors(job.sequences // dp) if d <= 4])
    zero = rng.choice([0, 1, 2, 3])
    schedule = rng.choice(list(REGISTRY)) if pp > 1 else "1f1b"
    virtual = rng.choice([v for v in (1, 2, 3) if REGISTRY[schedule].takes(v)])
    return Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=rng.choice([d for d in divisors(job.model.moe.experts if job.model.moe else 1) if dp * cp % d == 0]),
        zero=zero,
        zero_shards=rng.choice([None, *divisors(dp * cp)]) if zero else None,
        keep_gathered=zero == 3 and rng.random() < 0.5,
        sequence_parallel=rng.random() < 0.7,
        data_parallel=rng.choice(["bucketed", "hooks", "naive"]),
        context_parallel=rng.choice(["zigzag", "ring", "allgather", "ulysses"]),
        schedule=schedule,  # type: ignore[arg-type]
        virtual_stages=virtual,
        mbs=mbs,
        gas=job.sequences // dp // mbs,
        recompute=rng.choice(["none", "selective", "full"]),
        offload=rng.choice(["none", "none", "optimizer", *(["parameters"] if zero == 3 else [])]),
    )
