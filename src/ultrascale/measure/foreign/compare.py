"""A rehearsed foreign program beside the Estimate of the plan that it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ultrascale.cost.estimate import estimate
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.traffic import of_stage
from ultrascale.measure.foreign.request import ForeignRehearsal, ForeignRequest
from ultrascale.measure.rehearse import RehearsedTerm, predicted_flops, without_imbalance
from ultrascale.specs.framework import Framework
from ultrascale.specs.plan import Plan

EAGER = "torchtitan-eager"
"""the preset of torchtitan without torch.compile, which is what is rehearsed"""


@dataclass(frozen=True)
class ForeignReport:
    request: ForeignRequest
    found: ForeignRehearsal
    compared: PlanBeside | None
    """with a plan"""


@dataclass(frozen=True)
class PlanBeside:
    terms: Sequence[RehearsedTerm]
    framework: str
    """of the estimate"""
    planned_gib: float
    """the plan's own estimate of all memory, with its own framework"""
    planned_for: str


def compared(plan: Plan, found: ForeignRehearsal) -> PlanBeside:
    """Owners that both sides define alike, all tensors at the peak, FLOPs and bytes sent."""
    from ultrascale.parallel.mesh import RankCoordinates

    job, layout = without_imbalance(plan.job).changed(framework=Framework.load(EAGER)), plan.layout
    place = RankCoordinates.of(layout, found.rank)
    law = estimate(job, layout).memory[place.pp].memory
    sent = sum(one.bytes for one in of_stage(job, layout, ClusterRates(job), place.pp))
    terms = (
        RehearsedTerm("optimizer states", law.optimizer, found.memory.get("optimizer", 0), "B"),
        RehearsedTerm("all tensors at the peak", law.total - law.runtime, found.peak, "B"),
        RehearsedTerm("FLOPs", predicted_flops(job, layout, place), sum(found.flops.values()), "FLOP"),
        RehearsedTerm("sent", sent, sum(one.bytes for one in found.collectives), "sent"),
    )
    planned = plan.estimate.memory[place.pp].memory.total
    return PlanBeside(terms, EAGER, planned / 2**30, plan.job.framework.name)
