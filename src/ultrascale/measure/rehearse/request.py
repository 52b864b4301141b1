"""What can be rehearsed: which ranks of which plans on which device. Said before torch is loaded."""

from __future__ import annotations

from ultrascale.specs.errors import SpecError
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training
from ultrascale.train import supported

DEVICES = ("meta", "cuda")
KERNELS = ("fused", "eager")


def kernels_of(job: Job, device: str, asked: str | None = None) -> str:
    """With which kernels the engine is rehearsed: those asked for, else a GPU's where the plan has GPUs.

    fp8 is computed on a GPU alone; emulated, it is a matter of operators.
    """
    if asked is not None and asked not in KERNELS:
        raise SpecError(f"--kernels is {asked!r} but a rehearsal runs the engine's fused kernels or eager operators: try fused")
    emulated = device == "meta" and job.precision == "fp8"
    if emulated and asked == "fused":
        raise SpecError(
            "--kernels is fused but without a GPU fp8 is emulated operator by operator: try eager, or --device cuda"
        )
    return asked or ("eager" if emulated or job.cluster.gpu.name == "cpu" else "fused")


def engine_of(kernels: str) -> Framework:
    """How the cost model knows our engine with such kernels."""
    return Framework.load("ultrascale-gpu" if kernels == "fused" else "ultrascale-eager")


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
