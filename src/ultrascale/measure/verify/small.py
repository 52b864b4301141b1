"""What `verify` runs: the layouts that were asked for, at sizes that this machine runs in seconds. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ultrascale.measure.verify.compositions import compositions, spread
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model, MoE
from ultrascale.specs.plan import Plan
from ultrascale.train.request import Overrides, from_plan
from ultrascale.train.supported import PRECISIONS

MOST_PROCESSES = 16
MOST_SEQUENCES = 32  # per data rank
LARGEST = 5_000_000  # parameters of a model that is verified as it is
SPREAD = 24  # layouts that `verify --world` tries without --all


def to_verify(
    words: list[str], world: int | None, only: str | None, everything: bool, model: str, precision: str = "fp32"
) -> tuple[Job, list[Layout], tuple[str, ...]]:
    """A plan and its changes, or every kind of layout of `world` processes: the job, its layouts, what was made smaller."""
    if world is None:
        plan, changes = Plan.load(words[0]), Overrides.parse(words[1:])
        request = from_plan(plan, changes, plan.layout.changed(**changes.layout).gpus)
        small = reduced(request.job, request.layout, _known(precision))
        return small.job, [small.layout], small.notes
    if not 1 <= world <= MOST_PROCESSES:
        raise SpecError(f"--world is {world} but must be from 1 to {MOST_PROCESSES}, such as 8")
    shape = Model.load(model)
    if shape.parameters > LARGEST:
        raise SpecError(f"--model is {model} with {shape.parameters:,} parameters, too many to try every layout: try tiny")
    sequences = 16 if 16 % world == 0 else 4 * world
    job = small_job(shape, world, sequences=sequences, precision=_known(precision))
    layouts = compositions(job, world, [word.strip() for word in only.split(",") if word.strip()] if only else [])
    if not layouts:
        raise SpecError(f"no layout of {world} processes uses {only}: try --world 8, or fewer words in --only")
    return job, layouts if everything else spread(layouts, SPREAD), ()


def _known(precision: str) -> str:
    if precision not in PRECISIONS:
        raise SpecError(f"--precision is '{precision:.20}' but must be one of {', '.join(PRECISIONS)}: try fp32")
    return precision


def small_job(model: Model, world: int, seq: int = 64, sequences: int = 16, precision: str = "fp32") -> Job:
    """A job for `verify`: a short sequence, a small batch."""
    return Job(model=model, cluster=Cluster.load(f"{world}xh100"), seq=seq, batch_tokens=seq * sequences, precision=precision)


@dataclass(frozen=True)
class ReducedPlan:
    """A plan at sizes that this machine runs in seconds, and what was made smaller for it."""

    job: Job
    layout: Layout
    notes: tuple[str, ...]


def reduced(job: Job, layout: Layout, precision: str = "fp32") -> ReducedPlan:
    """Axes, stages, schedule and variants stay: what is proven is the layout, not the model's width."""
    notes = []
    model = job.model
    if model.parameters > LARGEST:
        model = _narrow(model, layout.tp, layout.ep)
        widths = f"hidden {model.hidden}, ffn {model.ffn}, vocab {model.vocab}"
        if model.moe is not None:
            widths += f", {model.moe.experts} experts of {model.moe.expert_ffn}"
        notes.append(f"{job.model.name} at {widths}; layers and heads as they are")
    cut = layout
    if layout.gpus > MOST_PROCESSES:
        dp = max(1, min(layout.dp, MOST_PROCESSES // (layout.tp * layout.pp * layout.cp)))
        cut = layout.model_copy(update={"dp": dp, "ep": math.gcd(layout.ep, dp * layout.cp), "zero_shards": None})
        if cut.gpus > MOST_PROCESSES:
            raise SpecError(
                f"layout.tp·pp·cp is {layout.tp}·{layout.pp}·{layout.cp} = {layout.gpus // layout.dp}, but verify starts at "
                f"most {MOST_PROCESSES} processes on one machine: try smaller ones, such as layout.pp=2"
            )
        notes.append(f"dp {cut.dp} instead of {layout.dp}: more replicas compute what these do")
        if cut.ep != layout.ep:
            notes.append(f"ep {cut.ep} instead of {layout.ep}")
    if layout.mbs * layout.gas > MOST_SEQUENCES:
        gas = min(layout.gas, max(2 * layout.pp, 2))
        cut = cut.model_copy(update={"mbs": 1, "gas": gas})
        notes.append(f"{gas} micro-batches of one sequence instead of {layout.gas} of {layout.mbs}")
    seq = min(job.seq, max(64, 8 * layout.cp * layout.tp))
    if seq < job.seq:
        notes.append(f"sequences of {seq} tokens instead of {job.seq:,}")
    if job.precision != precision:
        notes.append(f"{precision} instead of {job.precision} (--precision {job.precision} verifies that, within wider bounds)")
    return ReducedPlan(small_job(model, cut.gpus, seq, cut.dp * cut.mbs * cut.gas, precision), cut, tuple(notes))


def _narrow(model: Model, tp: int, ep: int) -> Model:
    width = 64 * tp
    learned: dict[str, Any] = {"max_positions": min(model.max_positions or 4096, 4096)} if model.positions == "learned" else {}
    sizes = {"hidden": 64, "head_dim": 8, "ffn": 2 * width, "vocab": -(-256 // tp) * tp}
    if model.moe is not None:
        learned["moe"] = _fewer(model.moe, ep, 8 * tp)
        sizes["ffn"] = sizes["ffn"] if model.dense_layers else 0
    return model.model_copy(update={"name": f"narrow {model.name}", **sizes, **learned})


def _fewer(moe: MoE, ep: int, width: int) -> MoE:
    """As many experts as a token chooses from and ep divides, and some more."""
    experts = min(moe.experts, ep * -(-2 * moe.top_k // ep))
    shared = {"shared_expert_ffn": width} if moe.shared_experts else {}
    return moe.model_copy(update={"experts": experts, "expert_ffn": width, **shared})
