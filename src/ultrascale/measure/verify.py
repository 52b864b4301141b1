"""Verify: does a layout compute what one process computes? Losses, norms and every gradient; and the first module that differs.

One process runs the whole batch and writes its tensors to a file; each rank of the layout compares its parts with slices of
that file, within bounds of rounding (verify_recording.py). A layout that differs runs again with every module traced.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ultrascale.data.corpora import corpus
from ultrascale.launch import local
from ultrascale.launch.rank_info import RankInfo
from ultrascale.launch.rendezvous import join, leave
from ultrascale.measure.verify_recording import PERTURBED_RUNS, Bounds, Item, StepPlan, StepRunner, record, rounding
from ultrascale.parallel.mesh import Mesh, RankCoordinates
from ultrascale.specs.batch_ramp import BatchRamp
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import RunError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training
from ultrascale.train.build import build_engine
from ultrascale.train.data import Batches
from ultrascale.train.engine import Engine
from ultrascale.train.optimizer import Weight

STEPS = 3
TIMEOUT_S = 300.0
EMBEDDING = "embed.tokens.weight"


@dataclass(frozen=True)
class Difference:
    """One layout compared with one process."""

    layout: Layout
    loss_error: float
    """largest relative difference of a step's loss, or of its gradient norm"""
    grad_error: float
    """largest difference of a gradient, relative to its largest entry; first and last step"""
    excess: float
    """the largest difference over its bound; up to 1, rounding explains it"""
    worst: str
    """the tensor with that difference"""
    problem: str = ""
    """why nothing could be compared"""
    where: str = ""
    """the first module and tensor that differ"""

    @property
    def ok(self) -> bool:
        return not self.problem and self.excess <= 1


@dataclass
class RankResult:
    """The differences on one rank of a layout."""

    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    """by key: relative difference, and that over its bound"""
    rows: dict[str, set[int]] = field(default_factory=dict)
    """by key: sequences of the batch that reached a module on this rank"""
    elements: int = 0
    """gradient entries that were compared and count once in the whole model"""


def verify(job: Job, layouts: Iterable[Layout], training: Training | None = None) -> Iterator[Difference]:
    """Compare each layout with one process. Batch and precision are those of the job."""
    training = training or Training(steps=STEPS, warmup_steps=0, eps=1e-5, graphs="never")
    with tempfile.TemporaryDirectory(prefix="ultrascale-") as folder:
        references: dict[tuple[int, bool], Reference] = {}

        def reference(layout: Layout, trace: bool) -> Reference:
            sequences = layout.dp * layout.mbs * layout.gas
            key = (sequences, trace)
            if key not in references:
                last = training.steps - 1
                steps = [
                    StepPlan(number, training, gradients=trace or number in (0, last), trace=trace, weights=trace)
                    for number in range(training.steps)
                ]
                references[key] = make_reference(job, sequences, steps, Path(folder) / f"{sequences}-{trace}.pt")
            return references[key]

        # In fp32 gradients suffice; the wider bounds of other formats would hide what a module's output shows.
        traced = job.precision != "fp32"
        for layout in layouts:
            difference = _compare(job, layout, reference(layout, traced))
            if not difference.ok and not traced:
                found = _compare(job, layout, reference(layout, True))
                difference = replace(difference, where=found.where, problem=difference.problem or found.problem)
            yield difference


@dataclass(frozen=True)
class Reference:
    """Tensors of some steps of one process, on disk, with the bounds of rounding."""

    file: Path
    steps: Sequence[StepPlan]
    bounds: Bounds

    def whole(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = torch.load(self.file, weights_only=True, mmap=True)
        return tensors

    @property
    def keys(self) -> list[str]:
        """In the order of computation."""
        return list(self.bounds.by_key)


def make_reference(job: Job, sequences: int, steps: Sequence[StepPlan], file: Path) -> Reference:
    alone = job.changed(cluster=Cluster.load("1xh100"), batch_tokens=sequences * job.seq)
    mbs = BatchRamp.of(steps[0].training.batch_ramp, job.seq, sequences).divisor
    layout = Layout(mbs=mbs, gas=sequences // mbs)
    (bounds,) = local.run(_run_one_rank, 1, alone, layout, steps, file, timeout_s=TIMEOUT_S)
    return Reference(file, steps, bounds)


def _run_one_rank(rank: int, nproc: int, store: str, job: Job, layout: Layout, steps: Sequence[StepPlan], file: Path) -> Bounds:
    def run(seed: int | None) -> dict[str, torch.Tensor]:
        engine = make_engine(RankInfo(), job, layout, steps[0].training)
        return record(StepRunner(engine, any(step.trace for step in steps), seed), steps)

    whole = run(None)
    torch.save(whole, file)
    perturbed = [run(seed) for seed in range(PERTURBED_RUNS)]
    return Bounds.measured(whole, perturbed, rounding(job.precision), steps[0].training.router_bias_rate)


def _compare(job: Job, layout: Layout, reference: Reference) -> Difference:
    cut = job.changed(cluster=Cluster.load(f"{layout.gpus}xh100"), batch_tokens=layout.batch_tokens(job.seq))
    try:
        ranks: list[RankResult] = local.run(_rank, layout.gpus, cut, layout, reference, timeout_s=TIMEOUT_S)
    except (local.RankError, RunError) as failure:
        return Difference(layout, math.inf, math.inf, math.inf, "", problem=str(failure).strip().splitlines()[-1])
    largest = {key: max(result.errors.get(key, (0.0, 0.0)) for result in ranks) for key in reference.keys}
    worst = max(largest, key=lambda key: largest[key][1])

    def error(*sections: str) -> float:
        return max((value for key, (value, _) in largest.items() if key.split("/")[1] in sections), default=0.0)

    return Difference(
        layout,
        error("loss", "grad_norm"),
        error("gradient"),
        largest[worst][1],
        worst,
        _not_compared(reference, ranks),
        first_difference(layout, reference, ranks),
    )


def _rank(rank: int, nproc: int, store: str, job: Job, layout: Layout, reference: Reference) -> RankResult:
    steps = reference.steps
    engine = make_engine(RankInfo(rank, nproc, rank, nproc, store), job, layout, steps[0].training)
    whole = reference.whole()
    runner, result = StepRunner(engine, any(step.trace for step in steps)), RankResult()
    result.elements = sum(step.gradients for step in steps) * sum(
        weight.master.numel() for weight in engine.weights if weight.shard.is_primary and _first_replica(weight)
    )
    for step in steps:
        compare_items(runner.run(step), reference, whole, result)
    leave()
    return result


def compare_items(items: Iterable[Item], reference: Reference, whole: Mapping[str, torch.Tensor], result: RankResult) -> None:
    """Add to `result` how far each item of a rank is from one process."""
    for item in items:
        step, section, *_ = (key := item.key).split("/")
        if key not in whole and section == "norm":
            continue  # of a tied head on a stage of its own, whose gradient is the embedding's
        key = key if key in whole else f"{step}/{section}/{EMBEDDING}"
        found = reference.bounds.excess(key, item.value, item.slice(whole[key]))
        result.errors[key] = max(found, result.errors.get(key, (0.0, 0.0)))
        if item.rows:
            result.rows.setdefault(key, set()).update(item.rows)


def _not_compared(reference: Reference, ranks: Sequence[RankResult]) -> str:
    exist = sum(value.numel() for key, value in reference.whole().items() if key.split("/")[1] == "gradient")
    compared = sum(result.elements for result in ranks)
    return "" if compared == exist else f"{compared:,} gradient entries were compared, {exist:,} exist"


def first_difference(layout: Layout, reference: Reference, ranks: Sequence[RankResult]) -> str:
    """The first key that differs, in the order of computation."""
    batch = layout.dp * layout.mbs * layout.gas
    for key in reference.keys:
        at, section, *name = key.split("/")
        reached = [result.rows[key] for result in ranks if key in result.rows]
        if reached and (left_out := sorted(set(range(batch)) - set().union(*reached))):
            missing = f"{_join_first(left_out)} of the batch's {batch}"
            return f"step {at}, {_SECTIONS[section]} {name[0]}: missing for sequences {missing}"
        differ = [rank for rank, result in enumerate(ranks) if result.errors.get(key, (0.0, 0.0))[1] > 1]
        if differ:
            error = max(ranks[rank].errors[key][0] for rank in differ)
            return (
                f"step {at}, {_SECTIONS.get(section, section)}{f' {name[0]}' if name else ''}: off by {error:.1e} of its "
                f"largest entry (bound {reference.bounds.by_key[key].largest:.1e}) on {_rank_names(layout, differ)}"
            )
    return ""


_SECTIONS = {
    "forward": "forward output of",
    "backward": "gradient by the output of",
    "gradient": "gradient of",
    "norm": "share in the gradient norm of",
    "weight": "updated weight",
    "grad_norm": "gradient norm",
    "eval_loss": "evaluation loss",
    "expert_tokens": "tokens per expert",
}


def _rank_names(layout: Layout, ranks: Sequence[int]) -> str:
    if len(ranks) == layout.gpus:
        return "every rank"
    named = [f"{rank} ({RankCoordinates.of(layout, rank).words(layout)})" for rank in ranks]
    return f"rank {_join_first(named)} of {layout.gpus}"


def _join_first(values: Sequence[object], most: int = 4) -> str:
    rest = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(map(str, values[:most])) + rest


def _first_replica(weight: Weight) -> bool:
    """Of data ranks with the same gradients, one counts them."""
    return weight.shard.copies is not None and weight.shard.copies.rank == 0


def make_engine(rank_info: RankInfo, job: Job, layout: Layout, training: Training) -> Engine:
    device = join(rank_info, training.timeout_s)
    torch.set_num_threads(1)
    mesh = Mesh.build(layout, job.model.kv_heads, rank_info.rank, device)
    sequences = layout.dp * layout.mbs * layout.gas
    batches = Batches(corpus(training, job.model.vocab), job.seq, sequences, training.seed, training.batch_ramp)
    return build_engine(job, mesh, training, batches)
