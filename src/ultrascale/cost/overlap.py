"""What of a transfer is seen: the part that no computation hides, and the slow-down of the computation that hides the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.cost.collectives import Op, wire_bytes
from ultrascale.cost.columns import Array
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.mesh import CommGroup
from ultrascale.specs.efficiency import Efficiency


def exposed(transfer_s: Array, window_s: Array, constants: Efficiency) -> Array:
    """Beyond `overlap` of the window the transfer waits; while it hides, computing is slowed (it shares SMs and HBM)."""
    hidden = np.minimum(transfer_s, constants.overlap * window_s)
    return np.asarray(transfer_s - hidden + constants.overlap_slowdown * hidden)


@dataclass(frozen=True)
class CollectiveTransfer:
    """A collective that a technique calls: on which group, with how large a buffer, and how long one call takes."""

    technique: str
    collective: Op
    group: CommGroup
    buffer_bytes: Array
    time_s: Array

    @property
    def wire_bytes(self) -> Array:
        return wire_bytes(self.collective, self.buffer_bytes, self.group.size)


def transfer(
    machine: ClusterRates, technique: str, collective: Op, buffer_bytes: Array, group: CommGroup
) -> CollectiveTransfer:
    """Nothing to send is no call: a dense model has no experts to gather, and waits for no latency of theirs."""
    send = collective == "send_recv"
    time = machine.send_s(buffer_bytes, group) if send else machine.collective_s(collective, buffer_bytes, group)
    return CollectiveTransfer(technique, collective, group, buffer_bytes, np.where(np.asarray(buffer_bytes) > 0, time, 0.0))


@dataclass(frozen=True)
class OverlapRatio:
    """An overlap ratio of the cheat-sheet: transfer time over the computation that should hide it. Below 1 it can.

    `printed` is the cheat-sheet's own form, `corrected` the derived one; both are numbers for one layout.
    """

    technique: str
    printed_form: str
    printed: float | None
    corrected_form: str
    corrected: float | None
    slip: str
