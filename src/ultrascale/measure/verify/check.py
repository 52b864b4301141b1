"""Does a layout compute what one process computes? Loss and every gradient, in fp32, over several steps.

One process runs the whole batch and leaves its losses and gradients in a file; each rank of the layout compares its own
pieces with that file's slices. The bound is 10⁻⁵, relative to the largest entry of the tensor: fp32 rounds at 6·10⁻⁸, sums of
a batch in another order differ by some tens of that, and a reduction left out, the mistake that a test plants, by
0.78. Two gradients need care. That of a key's bias is zero but for rounding, so no tensor is measured against less than a
thousandth of the largest entry of all; and AdamW turns an entry that is pure rounding into a whole step, so eps is 10⁻⁵ here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ultrascale.parallel import local
from ultrascale.parallel.mesh import Mesh
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import RunError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training
from ultrascale.train.data import Batches, corpus
from ultrascale.train.engine import Engine
from ultrascale.train.optimizer import Weight
from ultrascale.train.run import join, leave
from ultrascale.train.world import Seat

BOUND = 1e-5
FLOOR = 1e-3  # of the largest gradient entry of the model: what a tensor's entries are at least measured against
STEPS = 3
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Difference:
    """One layout beside one process."""

    layout: Layout
    loss_error: float
    """largest relative difference of a step's loss, or of its gradient norm"""
    grad_error: float
    """largest difference of a gradient's entry, relative to the largest of that gradient (see FLOOR); first and last step"""
    worst: str
    """the parameter that has it"""
    problem: str = ""
    """why nothing could be compared"""

    @property
    def ok(self) -> bool:
        return not self.problem and self.loss_error <= BOUND and self.grad_error <= BOUND


@dataclass(frozen=True)
class Trial:
    """What one run of a few steps left behind."""

    losses: list[float]
    norms: list[float]
    grad_error: float = 0.0
    worst: str = ""
    elements: int = 0
    """gradient entries that were compared and count once in the whole model"""


def verify(job: Job, layouts: Iterable[Layout], training: Training | None = None) -> Iterator[Difference]:
    """Each layout against one process, one after the other. The job's batch and precision are those of the comparison."""
    training = training or Training(steps=STEPS, warmup_steps=0, eps=1e-5)
    with tempfile.TemporaryDirectory(prefix="ultrascale-") as folder:
        references: dict[int, tuple[Path, Trial]] = {}
        for layout in layouts:
            sequences = layout.dp * layout.mbs * layout.gas
            if sequences not in references:
                references[sequences] = _reference(job, sequences, training, Path(folder) / f"{sequences}.pt")
            yield _compare(job, layout, training, *references[sequences])


def _reference(job: Job, sequences: int, training: Training, file: Path) -> tuple[Path, Trial]:
    alone = job.changed(cluster=Cluster.load("1xh100"), batch_tokens=sequences * job.seq)
    (trial,) = local.run(_alone, 1, alone, Layout(mbs=1, gas=sequences), training, file, timeout_s=TIMEOUT_S)
    return file, trial


def _alone(rank: int, nproc: int, store: str, job: Job, layout: Layout, training: Training, file: Path) -> Trial:
    engine = _engine(Seat(), job, layout, training)
    losses, norms = [], []
    kept: dict[str, torch.Tensor] = {}
    for number in range(training.steps):
        loss = engine.backward(engine.read(number))
        if number in _looked_at(training):
            kept |= {f"{number}/{weight.shard.name}": weight.gradient.clone() for weight in engine.weights}
        result = engine.update(number, loss)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    torch.save(kept, file)
    return Trial(losses, norms)


def _compare(job: Job, layout: Layout, training: Training, file: Path, alone: Trial) -> Difference:
    cut = job.changed(cluster=Cluster.load(f"{layout.gpus}xh100"), batch_tokens=layout.batch_tokens(job.seq))
    try:
        trials: list[Trial] = local.run(_rank, layout.gpus, cut, layout, training, file, timeout_s=TIMEOUT_S)
    except (local.RankError, RunError) as failure:
        return Difference(layout, float("inf"), float("inf"), "", problem=str(failure).strip().splitlines()[-1])
    expected = sum(weight.numel() for weight in torch.load(file, weights_only=True, mmap=True).values())
    compared = sum(trial.elements for trial in trials)
    problem = "" if compared == expected else f"{compared:,} gradient entries were compared, {expected:,} exist"
    worst = max(trials, key=lambda trial: trial.grad_error)
    pairs = [(trial, name) for trial in trials for name in ("losses", "norms")]
    loss_error = max(_largest(getattr(trial, name), getattr(alone, name)) for trial, name in pairs)
    return Difference(layout, loss_error, worst.grad_error, worst.worst, problem)


def _largest(seen: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(seen, expected, strict=True))


def _rank(rank: int, nproc: int, store: str, job: Job, layout: Layout, training: Training, file: Path) -> Trial:
    engine = _engine(Seat(rank, nproc, rank, nproc, store), job, layout, training)
    whole = torch.load(file, weights_only=True, mmap=True)
    largest = {number: _largest_entry(whole, number) for number in _looked_at(training)}
    losses, norms, elements = [], [], 0
    error, worst = 0.0, ""
    for number in range(training.steps):
        loss = engine.backward(engine.read(number))
        if number in _looked_at(training):
            for weight in engine.weights:
                reference = whole[f"{number}/{_reference_name(weight, whole, number)}"]
                scale = max(float(reference.abs().max()), FLOOR * largest[number])
                error, worst = max((error, worst), (_error(weight, reference) / scale, weight.shard.name))
                elements += weight.gradient.numel() if weight.counted and _first_replica(weight) else 0
        result = engine.update(number, loss)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    leave()
    return Trial(losses, norms, error, worst, elements)


def _looked_at(training: Training) -> tuple[int, ...]:
    return (0, training.steps - 1)


def _reference_name(weight: Weight, whole: dict[str, torch.Tensor], number: int) -> str:
    """A tied head on a stage of its own has the embedding's gradient."""
    name = weight.shard.name
    return name if f"{number}/{name}" in whole else "embed.tokens.weight"


def _error(weight: Weight, reference: torch.Tensor) -> float:
    part = weight.shard.piece(reference)
    if not part.numel():
        return 0.0
    error = float((weight.gradient - part).abs().max())
    return error if error == error else float("inf")


def _largest_entry(whole: dict[str, torch.Tensor], number: int) -> float:
    return max(float(gradient.abs().max()) for name, gradient in whole.items() if name.startswith(f"{number}/"))


def _first_replica(weight: Weight) -> bool:
    """Among data ranks that hold the same gradients, one counts them."""
    return weight.shard.copies is not None and weight.shard.copies.rank == 0


def _engine(seat: Seat, job: Job, layout: Layout, training: Training) -> Engine:
    device = join(seat, training.timeout_s)
    torch.set_num_threads(1)
    mesh = Mesh.build(layout, job.model.kv_heads, seat.rank, device)
    batches = Batches(corpus(training, job.model.vocab), job.seq, layout.dp * layout.mbs * layout.gas, training.seed)
    return Engine(job, mesh, training, batches)
