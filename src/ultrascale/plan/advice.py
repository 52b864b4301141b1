"""Advice where a job cannot be met as it stands: the nearest batch, the smallest change that makes it fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ultrascale.cost import engines
from ultrascale.cost.estimate import estimate
from ultrascale.cost.ranges import MIN_FIT, memory_limit_gib
from ultrascale.plan.candidates import LayoutConstraints, rank
from ultrascale.specs.engine import OWN_ENGINE
from ultrascale.specs.errors import SpecError, divisors
from ultrascale.specs.estimate import Estimate
from ultrascale.specs.framework import Framework
from ultrascale.specs.gpu import GPU
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import GIB, seconds

MOST_GPUS = 2**17
IDEALISED = "playbook"  # the engine that runs every legal layout
LAYOUTS_PER_CHANGE = 8  # layouts of a change: those that fit by closed forms may be just over the edge
NEARBY = 0.10  # a batch this much larger or smaller is worth a word


@dataclass(frozen=True)
class Change:
    """One change that makes the job fit, with what it then does."""

    text: str
    job: Job
    layout: Layout
    estimate: Estimate


@dataclass(frozen=True)
class NoFit:
    layout: Layout
    """the layout that comes closest"""
    peak_gib: float
    capacity_gib: float
    changes: tuple[Change, ...]
    """cheapest first: those that need no other hardware, then the fewest GPUs"""
    lora_gib: float
    """what low-rank adapters on frozen weights would need, under the layout that comes closest"""

    @property
    def short_gib(self) -> float:
        return self.peak_gib - self.capacity_gib

    def __str__(self) -> str:
        words = (
            f"nothing fits: the closest layout ({self.layout}) needs {self.peak_gib:,.1f} GiB per GPU "
            f"and there are {self.capacity_gib:,.1f} ({self.short_gib:,.1f} GiB too much)"
        )
        return f"{words}; cheapest change: {self.changes[0].text}" if self.changes else words


def reachable_batch(job: Job, constraints: LayoutConstraints) -> tuple[Job, list[str]]:
    """The job with the nearest batch that some layout can cut, and what was changed in words."""
    notes: list[str] = []
    requested, sequences = job.batch_tokens, job.sequences
    exact = sequences * job.seq
    if exact != requested:
        notes.append(
            f"a batch of {requested:,} tokens is not a whole number of {job.seq:,}-token sequences: "
            f"the nearest is {sequences:,} sequences = {exact:,} tokens"
        )
        job = job.changed(batch_tokens=exact)
    units = _batch_units(job, constraints)
    if not units or any(sequences % unit == 0 for unit in units):
        return job, notes
    nearest = min((max(1, round(sequences / unit)) * unit for unit in units), key=lambda n: (abs(n - sequences), n))
    notes.append(
        f"{sequences:,} sequences cannot be cut over {job.cluster.gpus} GPUs (dp·mbs·gas must equal them): "
        f"the nearest batch that can is {nearest:,} sequences = {nearest * job.seq:,} tokens"
    )
    return job.changed(batch_tokens=nearest * job.seq), notes


def _batch_units(job: Job, constraints: LayoutConstraints) -> set[int]:
    """dp·mbs (with what is pinned) of every way to fill the cluster: a batch must be a multiple of one of them."""
    model, world = job.model, job.cluster.gpus
    constraints = constraints.for_engine(job.framework.engine)
    units = set()
    for tp in constraints.among("tp", [d for d in divisors(world) if d <= model.heads and model.heads % d == 0]):
        for cp in constraints.among("cp", [d for d in divisors(world // tp) if job.seq % d == 0] if world % tp == 0 else []):
            for pp in constraints.among("pp", [d for d in divisors(max(1, world // (tp * cp))) if d <= model.layers]):
                dp, over = divmod(world, tp * cp * pp)
                if not over and dp and constraints.allows("dp", dp):
                    units.add(dp * constraints.fixed.get("mbs", 1) * constraints.fixed.get("gas", 1))
    return units


def batch_notes(job: Job, layout: Layout) -> list[str]:
    """Says when the batch's own divisors kept data parallelism small, and which batch nearby would open it."""
    sequences = job.sequences
    possible = [d for d in divisors(job.cluster.gpus) if sequences % d == 0]
    if layout.dp < max(possible):
        return []
    for degree in reversed([d for d in divisors(job.cluster.gpus) if d > layout.dp]):
        nearest = max(1, round(sequences / degree)) * degree
        if abs(nearest / sequences - 1) <= NEARBY:
            return [
                f"{sequences:,} sequences divide over at most dp = {max(possible)}; with {nearest:,} sequences "
                f"({nearest * job.seq:,} tokens, {nearest / sequences - 1:+.1%}) dp = {degree} is possible too"
            ]
    return []


def smaller_clusters(job: Job) -> list[Job]:
    """The cluster and its halves, down to one GPU: fewer GPUs often cost less per token, and always take longer."""
    jobs, gpus = [], job.cluster.gpus
    while gpus >= 1:
        jobs.append(job.changed(cluster=job.cluster if gpus == job.cluster.gpus else job.cluster.resized(gpus)))
        per_node = job.cluster.gpus_per_node
        if gpus == 1 or gpus % 2 or (gpus > per_node and (gpus // 2) % per_node):
            break
        gpus //= 2
    return jobs


def smaller_cluster_notes(job: Job, plans: Sequence[Plan]) -> list[str]:
    """Says when the first plan leaves GPUs idle, and what it costs in time against the first that uses all."""
    gpus, best = job.cluster.gpus, plans[0]
    used = best.job.cluster.gpus
    if used == gpus:
        return []
    whole = next((plan for plan in plans if plan.job.cluster.gpus == gpus), None)
    slower = f"; all {gpus} take {seconds(whole.estimate.step_time_s)}" if whole is not None else ""
    return [f"the first layout uses {used} of {gpus} GPUs and takes {seconds(best.estimate.step_time_s)} per step{slower}"]


def runnable_job(job: Job) -> tuple[Job, list[str]]:
    """The job, for the idealised engine where ours cannot run it, with notes that say so and what the model leaves out. Another
    engine must run the job.
    """
    sentence = engines.job_problem(job)
    notes = [*job.model.notes]
    if sentence is None:
        return job, notes
    if job.framework.engine != OWN_ENGINE:
        raise SpecError(f"{sentence}, or another --framework")
    note = f"`ultrascale train` cannot run this job: {sentence}. The plan is for an idealised engine (`{IDEALISED}`)"
    notes.append(f"{note}; to plan for an existing one: --framework megatron-core")
    return job.changed(framework=Framework.load(IDEALISED)), notes


Alternatives = Iterator[tuple[str, Job, LayoutConstraints]]


def no_fit(job: Job, constraints: LayoutConstraints, peak_bytes: float, layout: Layout) -> NoFit:
    """Tries, in the order of what they cost: narrower states, the host's memory, both, more GPUs, larger GPUs, shorter
    sequences.
    """
    remedies = (_narrower_states, _offload, _narrower_states_on_host, _more_gpus, _larger_gpu, _shorter_sequence)
    changes = [change for remedy in remedies if (change := _first_that_fits(remedy(job, constraints))) is not None]
    return NoFit(layout, peak_bytes / GIB, job.cluster.gpu.memory_gib, tuple(changes), lora_gib(job, layout))


LORA_RANK = 16


def lora_gib(job: Job, layout: Layout) -> float:
    """The layout's peak with adapters alone trained; infinite where they are not modelled."""
    if job.model.recurrence is not None or job.model.mtp_depth:
        return math.inf
    return estimate(job.changed(adapter_rank=LORA_RANK), layout).peak_gib


def _first_that_fits(alternatives: Alternatives) -> Change | None:
    for text, job, constraints in alternatives:
        if engines.job_problem(job) is not None:
            continue
        limit_gib = memory_limit_gib(job, MIN_FIT, 0.0)
        fastest = rank(job, constraints, "throughput", LAYOUTS_PER_CHANGE, limit_gib * GIB).rows
        for layout in map(fastest.layout, range(min(LAYOUTS_PER_CHANGE, len(fastest)))):
            predicted = estimate(job, layout)
            if predicted.peak_gib <= limit_gib:
                speed = f"{predicted.peak_gib:,.1f} GiB, {predicted.tokens_per_s_per_gpu:,.0f} tokens/s/GPU with {layout}"
                return Change(f"{text}: {speed}", job, layout, predicted)
    return None


def _offload(job: Job, constraints: LayoutConstraints) -> Alternatives:
    if "offload" not in constraints.fixed:
        for where in ("optimizer", "parameters"):
            fixed = LayoutConstraints({**constraints.fixed, "offload": where}, constraints.forbidden)
            yield f"keep the {where} on the host (--fix offload={where})", job, fixed


def _narrower_states_on_host(job: Job, constraints: LayoutConstraints) -> Alternatives:
    for states, narrower, _ in _narrower_states(job, constraints):
        for where, other, fixed in _offload(narrower, constraints):
            yield f"{states} and {where}", other, fixed


def _narrower_states(job: Job, constraints: LayoutConstraints) -> Alternatives:
    for fields, flags in (
        ({"gradients": "bf16"}, "--gradients bf16"),
        ({"optimizer": "adamw-8bit"}, "--optimizer adamw-8bit"),
        ({"gradients": "bf16", "optimizer": "adamw-8bit"}, "--gradients bf16 --optimizer adamw-8bit"),
    ):
        if job.precision != "fp32" and any(getattr(job, name) != value for name, value in fields.items()):
            yield f"store states in fewer bytes ({flags})", job.changed(**fields), constraints


def _more_gpus(job: Job, constraints: LayoutConstraints) -> Alternatives:
    gpus = job.cluster.gpus
    while gpus < MOST_GPUS:
        gpus *= 2
        try:
            larger = job.changed(cluster=job.cluster.resized(gpus))
        except SpecError:
            continue
        yield f"use {gpus} GPUs of the same kind (--cluster {gpus}x{job.cluster.gpu.name})", larger, constraints


def _larger_gpu(job: Job, constraints: LayoutConstraints) -> Alternatives:
    here = job.cluster.gpu
    larger = [g for g in GPU.presets().values() if g.memory_gib > here.memory_gib and g.vendor == here.vendor]
    for kind in sorted(larger, key=lambda g: g.memory_gib):
        slower = kind.peak_tflops.get(job.precision, 0.0) < here.peak_tflops[job.precision]
        if not slower and job.cluster.gpus % kind.gpus_per_node == 0:
            changed = job.changed(cluster=type(job.cluster).load(f"{job.cluster.gpus}x{kind.name}"))
            yield f"use GPUs with {kind.memory_gib:.0f} GiB (--cluster {changed.cluster.label})", changed, constraints


def _shorter_sequence(job: Job, constraints: LayoutConstraints) -> Alternatives:
    seq = job.seq
    while seq % 2 == 0 and seq > 512:
        seq //= 2
        yield f"train on sequences of {seq:,} tokens (--seq {seq})", job.changed(seq=seq), constraints
