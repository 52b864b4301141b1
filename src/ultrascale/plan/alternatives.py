"""Layouts of another kind than the fastest: less memory, fewer techniques, no pipeline parallelism."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ultrascale.cost.columns import Array, LayoutColumns, encode
from ultrascale.cost.table import Table
from ultrascale.schedules import DEFAULT_SCHEDULE
from ultrascale.specs.layout import Layout

LEAST_MEMORY, SIMPLEST, NO_PIPELINE, TP_IN_NODE = "least memory", "simplest", "no pipeline", "TP inside a node"
LEAST_MEMORY_MAX_SLOWDOWN = 1.10  # of the fastest step
SIMPLEST_MAX_SLOWDOWN = 1.03
MAX_SLOWDOWN = {LEAST_MEMORY: LEAST_MEMORY_MAX_SLOWDOWN, SIMPLEST: SIMPLEST_MAX_SLOWDOWN}
CANDIDATES_PER_KIND = 12  # of each kind: closed forms are some percent off, so the best are evaluated exactly


@dataclass
class AlternativeLayouts:
    """Of every table of a search: the fastest of each number of techniques, and the Pareto front of time and memory. Times are
    those of the closed forms.
    """

    _rows: list[LayoutColumns] = field(default_factory=list)
    _step_s: list[Array] = field(default_factory=list)
    _peak_bytes: list[Array] = field(default_factory=list)
    fastest_s: float = np.inf

    def add(self, cells: Table) -> None:
        self.fastest_s = min(self.fastest_s, float(cells.step_s.min(initial=np.inf)))
        if not np.isfinite(self.fastest_s):
            return
        core, variant = np.nonzero(cells.step_s <= LEAST_MEMORY_MAX_SLOWDOWN * self.fastest_s)
        order = np.argsort(cells.step_s[core, variant], kind="stable")
        core, variant = core[order], variant[order]
        rows, peak = cells.layouts(core, variant), cells.peak_bytes[core, variant]
        _, fastest_of_number = np.unique(techniques(rows), return_index=True)
        leaner = np.flatnonzero(peak < np.concatenate([[np.inf], np.minimum.accumulate(peak)[:-1]]))
        kept = np.union1d(fastest_of_number, leaner)
        self._rows.append(rows.take(kept))
        self._step_s.append(cells.step_s[core, variant][kept])
        self._peak_bytes.append(peak[kept])

    def candidates(self) -> dict[str, list[Layout]]:
        """Of each kind a few, best first by closed forms; a kind that no layout has is left out."""
        if not self._rows:
            return {}
        rows = LayoutColumns.joined(self._rows)
        step_s, peak = np.concatenate(self._step_s), np.concatenate(self._peak_bytes)
        slower = step_s / self.fastest_s
        kinds = {
            LEAST_MEMORY: np.where(slower <= LEAST_MEMORY_MAX_SLOWDOWN, peak, np.inf),
            SIMPLEST: np.where(slower <= SIMPLEST_MAX_SLOWDOWN, techniques(rows) + slower / 1e3, np.inf),
        }
        found = {
            kind: [n for n in np.argsort(score)[:CANDIDATES_PER_KIND] if np.isfinite(score[n])] for kind, score in kinds.items()
        }
        return {kind: [rows.layout(int(number)) for number in numbers] for kind, numbers in found.items() if numbers}


def techniques(rows: LayoutColumns) -> Array:
    """How many techniques a layout uses beside plain data parallelism."""
    used = [getattr(rows, axis) > 1 for axis in ("tp", "pp", "cp", "ep", "virtual_stages")]
    used += [rows.zero > 0, rows.zero == 3, rows.shards < rows.data_ranks, rows.recompute > 0, rows.offload > 0]
    used += [(rows.pp > 1) & (rows.schedule != encode("schedule", DEFAULT_SCHEDULE)), (rows.ep > 1) & (rows.dispatcher > 0)]
    return np.asarray(np.sum(used, axis=0))
