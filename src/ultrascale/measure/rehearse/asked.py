"""What can be rehearsed: which ranks of which plans on which device. Said before torch is loaded."""

from __future__ import annotations

from ultrascale.specs.errors import SpecError
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training
from ultrascale.train import supported

DEVICES = ("meta", "cuda")


def engine_of(device: str) -> Framework:
    """How the cost model knows our engine on such a device."""
    return Framework.load("ultrascale-gpu" if device == "cuda" else "ultrascale-eager")


def check(job: Job, layout: Layout, device: str) -> None:
    """Raises SpecError for what cannot be rehearsed."""
    if device not in DEVICES:
        raise SpecError(f"--device is {device!r} but a rehearsal runs on meta (no memory) or cuda (one GPU): try meta")
    if layout.gpus != job.cluster.gpus:
        raise SpecError(
            f"layout.dp·tp·pp·cp is {layout.gpus} but plan.job.cluster has {job.cluster.gpus} GPUs: plan anew, or try "
            f"nodes: {max(1, layout.gpus // job.cluster.gpus_per_node)}"
        )
    supported.check(job, layout, Training())
    if layout.data_parallel == "ddp" and layout.data_ranks > 1 and not layout.zero:
        raise SpecError(
            "layout.data_parallel is ddp but torch's reducer waits for other ranks: rehearse with data_parallel: bucketed"
        )
    if device == "cuda" and layout.ep > 1:
        raise SpecError(
            f"layout.ep is {layout.ep} but on a GPU other ranks would have to tell how many rows they send: try --device meta"
        )


def ranks_of(layout: Layout, rank: int | None, stage: str | None) -> list[int]:
    """The ranks to run: one, or the first of one pipeline stage or of each."""
    if rank is not None and stage is not None:
        raise SpecError("--rank and --stage name ranks in two ways: give one of them, such as --stage all")
    each = layout.gpus // layout.pp
    if stage == "all":
        return [place * each for place in range(layout.pp)]
    if stage is not None:
        if not stage.isdecimal() or int(stage) >= layout.pp:
            raise SpecError(f"--stage is {stage!r} but the plan has stages 0 to {layout.pp - 1}: try all")
        return [int(stage) * each]
    if rank is not None and not 0 <= rank < layout.gpus:
        raise SpecError(f"--rank is {rank} but the plan has ranks 0 to {layout.gpus - 1}: try 0")
    return [rank or 0]
