"""Ladders: one job run several times, each time with one thing more, so that what each bought can be seen.

Every rung is the real engine in a process of its own, which finds the GPU empty and leaves it so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ultrascale.cost.flops import model_flops
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import RunError, SpecError, nearest
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.training import Training
from ultrascale.specs.units import GIB
from ultrascale.train import supported
from ultrascale.train.memory_advice import is_out_of_memory

LADDERS = ("kernels",)
KERNELS = {
    "eager": "torch's operators one by one",
    "compile": "torch.compile of every block and of the head",
    "fused": "our own kernels, torch.compile for the rest",
}
WARM_UP = 4  # steps: compilation, the optimizer's states, the allocator's first blocks


@dataclass(frozen=True)
class Rung:
    name: str
    what: str
    step_s: float = 0.0
    """mean of the steps that count"""
    tokens_per_s: float = 0.0
    mfu: float | None = None
    """without the causal mask's saving, over the GPU's peak; None: its peak is not known"""
    peak_gib: float = 0.0
    loss: float = 0.0
    """of the last step: every rung must train alike"""
    ready_s: float = 0.0
    """from nothing to the end of the warm-up"""
    problem: str | None = None
    """why there are no figures"""


@dataclass(frozen=True)
class Ladder:
    name: str
    what: str
    rungs: tuple[Rung, ...]


def chosen(only: str | None) -> list[str]:
    words = LADDERS if only is None else tuple(word.strip().lower() for word in only.split(",") if word.strip())
    for word in words:
        if word not in LADDERS:
            raise SpecError(f"--only is '{only!s:.60}': {nearest(word, LADDERS)}")
    if not words:
        raise SpecError(f"--only names no ladder: try {LADDERS[0]}")
    return list(words)


def job_of(model: Model, cluster: Cluster | None, seq: int, mbs: int, steps: int) -> tuple[Job, Layout, Training]:
    """One micro-batch of random tokens a step on one GPU; a GPU of unknown kind counts as an H100, less its utilisation."""
    layout = Layout(mbs=mbs, gas=1)
    known = cluster if cluster is not None else Cluster.load("1xh100")
    job = Job(model=model, cluster=known, seq=seq, batch_tokens=mbs * seq, precision="bf16")
    training = Training(steps=WARM_UP + steps, data="synthetic")
    supported.check(job, layout, training)
    return job, layout, training


def kernels(
    model: Model, cluster: Cluster | None, seq: int, mbs: int, steps: int, say: Callable[[str], None] = lambda text: None
) -> Ladder:
    """eager → compile → fused (train.kernels)."""
    job, layout, training = job_of(model, cluster, seq, mbs, steps)
    rungs = []
    for number, (name, what) in enumerate(KERNELS.items(), 1):
        say(f"rung {number} of {len(KERNELS)}: {name}, {WARM_UP} steps to warm up and {steps} that count")
        rungs.append(apart(Rung(name, what), job, layout, training.changed(kernels=name), cluster is not None))
    counted = f"{steps} steps after {WARM_UP}" if steps > 1 else f"1 step after {WARM_UP}"
    return Ladder("kernels", f"{model.name}, {mbs} × {seq:,} tokens a step, bf16, AdamW, {counted}", tuple(rungs))


def apart(asked: Rung, job: Job, layout: Layout, training: Training, peak_known: bool) -> Rung:
    """The rung in a process of its own; one that fails is a row that says so."""
    from ultrascale.parallel import local

    def rank(_: int, __: int, ___: str) -> Rung:
        try:
            return stepped(asked, job, layout, training, peak_known)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return Rung(asked.name, asked.what, problem="out of memory")

    try:
        (found,) = local.run(rank, 1)
    except RunError as error:
        return Rung(asked.name, asked.what, problem=str(error).strip().splitlines()[-1])
    assert isinstance(found, Rung)
    return found


def stepped(asked: Rung, job: Job, layout: Layout, training: Training, peak_known: bool, device: str = "cuda") -> Rung:
    """In this process: the engine built and stepped."""
    import torch

    from ultrascale.parallel.mesh import Mesh
    from ultrascale.train.data import Batches, corpus
    from ultrascale.train.engine import Engine

    began = time.perf_counter()
    batches = Batches(corpus(training, job.model.vocab), job.seq, layout.mbs, training.seed)
    engine = Engine(job, Mesh.build(layout, job.model.kv_heads, 0, device), training, batches)
    for number in range(WARM_UP):
        engine.step(number)
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for number in range(WARM_UP, training.steps):
        result = engine.step(number)
    if on_gpu:
        torch.cuda.synchronize()
    step_s = (time.perf_counter() - started) / (training.steps - WARM_UP)
    rate = engine.tokens / step_s
    return Rung(
        asked.name,
        asked.what,
        step_s=step_s,
        tokens_per_s=rate,
        mfu=rate * model_flops(job.model, job.seq) / job.peak_flops if peak_known else None,
        peak_gib=torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0,
        loss=result.loss,
        ready_s=started - began,
    )
