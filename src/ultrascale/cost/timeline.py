"""Memory over one step on one pipeline stage: the action list with bytes attached."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ultrascale.cost import muon
from ultrascale.cost.columns import rows_of
from ultrascale.cost.legality import check
from ultrascale.cost.memory.chunk import fullest
from ultrascale.cost.stages import LayoutRows
from ultrascale.schedules import ActionKind, build, simulate
from ultrascale.schedules.simulate import Timeline
from ultrascale.specs.errors import SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout


@dataclass(frozen=True)
class TimelinePoint:
    """What a stage holds while one action runs; `static` are parameters, master, gradients and optimizer states."""

    start_s: float
    end_s: float
    action: str
    static_bytes: float
    activation_bytes: float
    buffer_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.static_bytes + self.activation_bytes + self.buffer_bytes


@lru_cache(maxsize=4)
def simulated(job: Job, layout: Layout) -> Timeline:
    """The whole pipeline of one step, action by action: what explain draws and the figures show, one after the other."""
    check(job, layout)
    schedule = build(layout.schedule, layout.pp, layout.gas, layout.virtual_stages)
    return simulate(schedule, LayoutRows.of(job, layout).stage_times())


def memory_timeline(job: Job, layout: Layout, stage: int = 0) -> tuple[TimelinePoint, ...]:
    """Every action of `stage` with what it holds meanwhile, then the optimizer step."""
    check(job, layout)
    if not 0 <= stage < layout.pp:
        raise SpecError(f"stage is {stage} but the layout has {layout.pp}: try 0 to {layout.pp - 1}")
    view = LayoutRows.of(job, layout)
    state = view.state
    base = float((state.parameters + state.master + state.optimizer)[stage])
    parts = view.parts()
    saved: dict[tuple[int, int], float] = {}
    points = []
    events = [event for event in simulated(job, layout).events if event.rank == stage]
    for event in events:
        kind, chunk, microbatch, _ = event.action
        key = (chunk, microbatch)
        now = parts.weight_grads
        if kind is ActionKind.F:
            # The loss waits with its layers: for a moment in most schedules, for the whole forward in AFAB.
            saved[key] = float(parts.kept[chunk] + parts.kept_loss[chunk])
            now = parts.forward_end
        elif kind is ActionKind.B:
            saved[key] = float(parts.kept[chunk])
            now = fullest(parts.layer, parts.loss)
        elif kind is ActionKind.I:
            saved[key] = float(parts.kept[chunk] + parts.dropped[chunk])
            now = fullest(parts.split_layer, parts.loss)
        live = sum(saved.values()) + float(now.activations[chunk])
        static = base + float(now.gradients[chunk])
        name = f"{kind.value}{microbatch}" + (f" of chunk {chunk}" if layout.virtual_stages > 1 else "")
        points.append(
            TimelinePoint(event.start_s, event.end_s, name, static, live, float(now.buffers[chunk] + now.parameters[chunk]))
        )
        if kind in (ActionKind.B, ActionKind.W):
            saved.pop(key)
    end = points[-1].end_s
    static = base + float(state.gradients[stage])
    buffers = muon.step_buffers(job, view.row, rows_of(view.share, slice(stage, stage + 1)))
    points.append(TimelinePoint(end, end, "optimizer step", static, 0.0, buffers))
    return tuple(points)
