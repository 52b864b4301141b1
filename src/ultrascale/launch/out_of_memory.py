"""The report of an out-of-memory error: memory by owner as planned, memory in use, and the nearest layouts that fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice
from typing import TYPE_CHECKING, Any

from ultrascale.cost.estimate import estimate
from ultrascale.launch.machine import memory_bytes
from ultrascale.specs.estimate import OWNERS, Estimate
from ultrascale.specs.layout import Layout
from ultrascale.specs.units import GIB
from ultrascale.train import supported
from ultrascale.train.request import Request

if TYPE_CHECKING:
    import torch

    from ultrascale.parallel.mesh import RankCoordinates

MAX_SUGGESTIONS = 3  # layouts that are suggested
MAX_ALTERNATIVES = 200  # other layouts that are tried if up to three changes are not enough
SAFE_PEAK_FRACTION = 0.9  # suggested layouts must stay below this share of the predicted peak that ran out of memory
_REQUESTED = re.compile(r"(?:[Tt]ried to allocate|you tried to allocate) ([\d.]+) ?(bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is out-of-memory: of a GPU's allocator, of the host's, or of Python."""
    return type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError) or "can't allocate memory" in str(error)


@dataclass(frozen=True)
class MemoryAtFailure:
    """Memory in bytes at the failure; None is unknown."""

    total: float
    """of the device, or of the host that all its processes share"""
    free: float | None = None
    allocated: float | None = None
    """on a GPU: peak of allocated tensors"""
    reserved: float | None = None
    """on a GPU: peak of memory reserved by the allocator"""
    resident: float | None = None
    """on a CPU: peak resident memory of this process"""

    def __str__(self) -> str:
        parts = [
            f"{_size(value)} {word}"
            for value, word in (
                (self.allocated, "in tensors at the most"),
                (self.reserved, "taken by the allocator"),
                (self.resident, "resident in this process"),
            )
            if value is not None
        ]
        left = "" if self.free is None else f"{_size(self.free)} free "
        return ", ".join([*parts, f"{left}of {_size(self.total)}"])


def current_memory(device: torch.device) -> MemoryAtFailure:
    """Memory in use; call it before anything is freed."""
    import torch

    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return MemoryAtFailure(total, free, torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return MemoryAtFailure(memory_bytes(), resident=peak)


def out_of_memory(request: Request, step: int, error: str, memory: MemoryAtFailure, place: RankCoordinates) -> str:
    """The whole report. `request` should be on the machine that ran out of memory (`Request.on`)."""
    predicted = estimate(request.job, request.layout)
    stage = predicted.memory[place.pp]
    owners = ", ".join(f"{owner} {_size(size)}" for owner in OWNERS if (size := getattr(stage.memory, owner)))
    requested = _REQUESTED.search(error)
    words = place.words(request.layout)
    where = f"rank {place.rank(request.layout)}" + (f" ({words})" if words else "")
    more = f": {_size(float(requested[1]) * _UNITS[requested[2]])} more were asked for" if requested is not None else ""
    sharing = request.layout.gpus if request.job.cluster.gpu.name == "cpu" else 1  # processes share the host
    # What a suggested layout may need: at most what there is, and clearly less than the layout that ran out.
    limit_gib = min(request.job.cluster.gpu.memory_gib, memory.total / sharing / GIB, SAFE_PEAK_FRACTION * predicted.peak_gib)
    lines = [
        f"{where} ran out of memory at step {step}{more}.",
        f"Held: {memory}.",
        f"By the plan stage {place.pp} with {stage.layers} layers peaks at {_size(stage.memory.total)}, at the {stage.moment}: "
        f"{owners}.",
    ]
    if predicted.peak_gib <= request.job.cluster.gpu.memory_gib:
        lines.append("That should have fitted: something else holds memory here, or the estimate is too low for this run.")
    return "\n".join([*lines, *_advice(request, predicted, limit_gib)])


def _advice(request: Request, predicted: Estimate, limit_gib: float) -> Iterator[str]:
    tried = list[tuple[Layout, Estimate]]()
    for layouts in _rounds(request):
        found = [(layout, estimate(request.job, layout)) for layout in layouts]
        fitting = [one for one in found if one[1].peak_gib <= limit_gib]
        fitting.sort(key=lambda one: (len(_changed(request.layout, one[0])), one[1].step_time_s))
        if fitting:
            yield "What would fit, nearest first; append to the command:"
            for layout, other in fitting[:MAX_SUGGESTIONS]:
                slower = other.step_time_s / predicted.step_time_s - 1
                yield f"  {_words(request.layout, layout)}   ({other.peak_gib:,.2f} GiB, {slower:+.0%} a step)"
            return
        tried += found
    smallest = min([(request.layout, predicted), *tried], key=lambda one: one[1].peak_gib)
    missing = smallest[1].peak_gib - limit_gib
    yield (
        f"No layout of {request.layout.gpus} processes fits: the smallest, {smallest[0]}, needs "
        f"{smallest[1].peak_gib:,.2f} GiB, {missing:,.2f} GiB too much. More processes or a shorter job.seq would help."
    )


def _rounds(request: Request) -> Iterator[list[Layout]]:
    """Layouts one change away, then two, then three; then all other layouts, with everything that saves memory."""
    changes = list(_changes(request))
    for together in (1, 2, 3):
        merged = [dict(pair for change in several for pair in change.items()) for several in combinations(changes, together)]
        # Two changes of one field would leave fewer fields than changes.
        layouts = [_adjusted(request, fields) for fields in merged if len(fields) == together]
        yield [
            layout
            for layout in dict.fromkeys(layouts)
            if layout is not None and supported.layout_problem(request.job, layout, request.training) is None
        ]
    saving = request.layout.model_copy(
        update={"recompute": "full", "recompute_layers": None, "zero": 3 if request.layout.data_ranks > 1 else 0, "mbs": 1}
    )
    yield list(islice(supported.alternatives(request.job, saving, request.training), MAX_ALTERNATIVES))


def _changes(request: Request) -> Iterator[dict[str, Any]]:
    """Changes of one field that save memory; dp and gas are adjusted."""
    layout = request.layout
    mbs = layout.mbs
    while mbs % 2 == 0:
        mbs //= 2
        yield {"mbs": mbs}
    stronger = {"none": ("selective", "full"), "selective": ("full",), "full": ()}
    yield from ({"recompute": word} for word in stronger[layout.recompute])
    if layout.recompute_layers:
        yield {"recompute_layers": None}
    if layout.data_ranks > 1:
        yield from ({"zero": level} for level in range(layout.zero + 1, 4))
    if layout.keep_gathered:
        yield {"keep_gathered": False}
    for axis in ("tp", "pp", "cp"):
        degree = getattr(layout, axis) * 2
        while layout.gpus % degree == 0:
            yield {axis: degree}
            degree *= 2
    if layout.offload == "none" and request.job.cluster.gpu.name != "cpu":
        yield {"offload": "optimizer"}


def _adjusted(request: Request, fields: dict[str, Any]) -> Layout | None:
    """The layout with these fields, the same number of processes and the same batch; None if that does not divide."""
    layout = request.layout.model_copy(update=fields)
    dp, rest = divmod(request.layout.gpus, layout.tp * layout.pp * layout.cp)
    if rest or not dp or request.job.sequences % (dp * layout.mbs):
        return None
    adjusted: dict[str, Any] = {"dp": dp, "gas": request.job.sequences // (dp * layout.mbs)}
    if dp != request.layout.dp:
        adjusted["zero_shards"] = None
    if dp * layout.cp == 1:
        adjusted |= {"zero": 0, "keep_gathered": False}
    return layout.model_copy(update=adjusted)


def _changed(before: Layout, after: Layout) -> dict[str, Any]:
    return {name: value for name, value in after.model_dump().items() if value != getattr(before, name)}


def _words(before: Layout, after: Layout) -> str:
    """Overrides for every field that differs: later words on a command line take precedence."""
    return " ".join(f"layout.{name}={str(value).lower()}" for name, value in _changed(before, after).items())


def _size(value: float) -> str:
    return f"{value / GIB:,.2f} GiB" if value >= GIB else f"{value / 2**20:,.1f} MiB"
