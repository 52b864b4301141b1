"""A rehearsed foreign program beside the Estimate of the plan that it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ultrascale.cost.estimate import estimate
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.traffic import of_stage
from ultrascale.measure.foreign.request import NOT_COMPILED, ForeignEngine, ForeignRehearsal, ForeignRequest
from ultrascale.measure.rehearse import MemoryRoom, RehearsedTerm, predicted_flops, without_imbalance
from ultrascale.specs.framework import Framework
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import GIB


@dataclass(frozen=True)
class ForeignReport:
    request: ForeignRequest
    found: ForeignRehearsal
    compared: PlanBeside | None
    """with a plan"""


@dataclass(frozen=True)
class PlanBeside:
    terms: Sequence[RehearsedTerm]
    room: MemoryRoom
    gpu: str
    stands_in: bool
    """what was rehearsed takes the place of what the plan would run: Megatron-Core's layers without Transformer Engine"""


def compared(plan: Plan, engine: ForeignEngine, found: ForeignRehearsal) -> PlanBeside:
    """Memory at the peak by owner, FLOPs and bytes sent."""
    from ultrascale.parallel.mesh import RankCoordinates

    eager = NOT_COMPILED in found.notes or plan.job.framework.name.endswith("-eager")
    version = (found.engine or "").rpartition(" ")[2]
    framework = Framework.load(engine.preset(version, eager))
    job, layout = without_imbalance(plan.job).changed(framework=framework), plan.layout
    place = RankCoordinates.of(layout, found.rank)
    stage = estimate(job, layout).memory[place.pp]
    law = stage.memory
    # Under FSDP2 the weights of a program are its shards, the law's masters; gathered copies are buffers.
    fsdp = engine.fsdp2 and layout.zero
    weights, gathered = (law.master, law.parameters) if fsdp else (law.master + law.parameters, 0.0)
    predicted = {
        "parameters": weights,
        "gradients": law.gradients,
        "optimizer": law.optimizer,
        "activations, buffers": law.activations + law.buffers + gathered,  # a rehearsal cannot tell all of them apart
    }
    owners = predicted.items() if found.memory else ()  # a GPU's allocator does not know them
    memory = {owner: sum(found.memory.get(one, 0) for one in owner.split(", ")) for owner in predicted}
    terms = [RehearsedTerm(owner, value, memory[owner], "B") for owner, value in owners]
    terms.append(RehearsedTerm("all", law.total - law.runtime, found.peak, "B"))
    terms.append(RehearsedTerm("FLOPs", predicted_flops(job, layout, place), sum(found.flops.values()), "FLOP"))
    sent = sum(one.bytes for one in of_stage(job, layout, ClusterRates(job), place.pp))
    terms.append(RehearsedTerm("sent", sent, sum(one.bytes for one in found.collectives), "sent"))
    planned, gpu = plan.estimate.memory[place.pp].memory.total / GIB, plan.job.cluster.gpu
    names = plan.job.framework.name, framework.name
    room = MemoryRoom(place.pp, found.peak / GIB, law.runtime / GIB, gpu.memory_gib, planned, *names)
    return PlanBeside(terms, room, gpu.name, engine.library and engine.eager is not None)
