"""Memory over one step by owner: every change on a CPU, where storages are followed; the allocator's own record on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ultrascale.measure.profile.picture import MemoryTimeline, thinned
from ultrascale.specs.measurement import MeasuredMemory
from ultrascale.train.engine import Engine
from ultrascale.train.memory import OWNERS, LiveBytes, account, states

RECORDED = 1_000_000  # of the allocator's events in one step, the last so many
FOLLOWED = "while every tensor was followed, which slows a step down"
RECORD = "from the allocator's record; what is no state counts as activations"

T = TypeVar("T")


@dataclass(frozen=True)
class StepMemory:
    """What a step held over time, and PyTorch's snapshot of it where there is one."""

    timeline: MemoryTimeline
    snapshot: Any = None


def followed(engine: Engine, step: Callable[[], T]) -> tuple[MeasuredMemory, T, StepMemory]:
    """Runs the step whose memory is counted."""
    return _on_cpu(engine, step) if engine.mesh.device.type == "cpu" else _on_gpu(engine, step)


def write_snapshot(seen: StepMemory, path: Path) -> None:
    """As torch.cuda.memory._dump_snapshot writes it: pytorch.org/memory_viz shows it."""
    import pickle

    with path.open("wb") as file:
        pickle.dump(seen.snapshot, file)


class _Recorder(LiveBytes):  # type: ignore[no-untyped-call]
    """Live bytes, written down whenever they change."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[float, ...]] = []
        self._began: float | None = None

    def begin(self) -> None:
        self._began = time.perf_counter()
        self._write()

    def _resize(self, living: Any, size: int) -> None:
        before = self.current
        super()._resize(living, size)
        if self._began is not None and self.current != before:
            self._write()

    def _write(self) -> None:
        assert self._began is not None
        held = self._by_owner
        self.rows.append((time.perf_counter() - self._began, *(held.get(owner, 0) for owner in OWNERS)))


def _on_cpu(engine: Engine, step: Callable[[], T]) -> tuple[MeasuredMemory, T, StepMemory]:
    live = _Recorder()

    def recorded() -> T:
        live.begin()
        return step()

    memory, result = account(engine, recorded, live)
    return memory, result, StepMemory(MemoryTimeline(OWNERS, thinned(live.rows), FOLLOWED))


def _on_gpu(engine: Engine, step: Callable[[], T]) -> tuple[MeasuredMemory, T, StepMemory]:
    device = engine.mesh.device
    before = _addresses(states(engine), device)
    base = torch.cuda.memory_allocated(device)
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=RECORDED)
    memory, result = account(engine, step)
    snapshot = torch.cuda.memory._snapshot(device)
    torch.cuda.memory._record_memory_history(enabled=None)
    after = _addresses(states(engine), device)
    index = device.index if device.index is not None else torch.cuda.current_device()
    events = snapshot["device_traces"][index] if snapshot["device_traces"] else []
    rows = from_record(events, before, after, base)
    return memory, result, StepMemory(MemoryTimeline(OWNERS, thinned(rows), RECORD), snapshot)


Held = Mapping[int, tuple[str, int]]
"""whose the memory at an address is, and how much"""


def _addresses(owned: Mapping[str, Iterable[torch.Tensor]], device: torch.device) -> dict[int, tuple[str, int]]:
    found = {}
    for owner, tensors in owned.items():
        for tensor in tensors:
            if tensor.device == device:
                storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
                found[storage.data_ptr()] = (owner, storage.nbytes())
    return found


def from_record(events: Iterable[Mapping[str, Any]], before: Held, after: Held, base: int) -> list[tuple[float, ...]]:
    """Rows of time and bytes by owner. `before`, `after`: the states around the step; `base`: what was allocated at first."""
    held = dict.fromkeys(OWNERS, 0)
    for owner, size in before.values():
        held[owner] += size
    held["activations"] += max(0, base - sum(held.values()))
    living = dict(before)
    rows: list[tuple[float, ...]] = []
    began: float | None = None
    for event in events:
        action, address, size = event["action"], event["addr"], event["size"]
        if action not in ("alloc", "free_completed"):
            continue
        if action == "alloc":
            owner = after[address][0] if address in after else "activations"
            living[address] = (owner, size)
            held[owner] += size
        else:
            owner, size = living.pop(address, ("activations", size))
            held[owner] = max(0, held[owner] - size)
        now = event.get("time_us", len(rows)) / 1e6
        began = now if began is None else began
        rows.append((now - began, *held.values()))
    return rows
