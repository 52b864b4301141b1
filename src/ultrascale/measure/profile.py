"""Profile: run the real training program under torch.profiler; every rank writes its trace and analyses it itself.

The ranks send their results to rank 0, so that no rank reads another's files, and a full disk loses the files alone.
"""

from __future__ import annotations

import errno
import gzip
import json
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from ultrascale import __version__
from ultrascale.launch.launcher import Run
from ultrascale.measure import profile_memory, trace_rank, trace_times
from ultrascale.measure.trace_analysis import Analysis, analyse
from ultrascale.measure.trace_times import RankTime
from ultrascale.specs.errors import RunError, SpecError, os_reason
from ultrascale.specs.files import write_text
from ultrascale.specs.folders import TRACES
from ultrascale.specs.measurement import MeasuredMemory
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import GIB, seconds
from ultrascale.train.engine import Engine, StepResult
from ultrascale.train.loop import Observer

MEMORY = "memory"


@dataclass(frozen=True)
class RankProfile:
    """What one rank sends to rank 0."""

    rank: int
    times: RankTime | None
    peak_bytes: float | None
    """of the step whose memory was recorded"""
    before_s: float | None
    """the last step before the profiler recorded"""
    problems: tuple[str, ...]


class Profiler(Observer):
    """Records the last `steps` steps of a rank with torch.profiler, and the memory of one step before."""

    def __init__(self, engine: Engine, out: Path | None, steps: int) -> None:
        super().__init__(engine)
        self.out, self.first, self.done = out, engine.training.steps - steps, 0
        self.memory: profile_memory.MemoryTimeline | None = None
        self.problems: list[str] = []
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (engine.mesh.device.type == "cuda")
        turns = schedule(wait=self.first - 1, warmup=1, active=steps, repeat=1)
        self._profile = profile(activities=activities, schedule=turns, acc_events=True)  # else it warns of a second cycle
        self._ended = [time.perf_counter()]
        self._profile.start()

    def account(self, step: Callable[[], StepResult]) -> tuple[MeasuredMemory, StepResult]:
        memory, result, self.memory = profile_memory.track_step(self.engine, step)
        return memory, result

    def on_step_end(self) -> None:
        self.done += 1
        self._ended.append(time.perf_counter())
        self._profile.step()
        if self.done == self.first:
            self._profile.add_metadata_json(trace_rank.OURS, json.dumps(facts(self.engine)))

    def report(self) -> list[RankProfile]:
        self._profile.stop()
        mine = self._rank_profile()
        if self.engine.mesh.world.size == 1:
            return [mine]
        everyone = [mine] * self.engine.mesh.world.size
        dist.all_gather_object(everyone, mine)
        return everyone

    def _rank_profile(self) -> RankProfile:
        rank = self.engine.mesh.rank
        times = self._trace(rank) if self.done > self.first else None
        if self.memory is not None:
            self._try_write(f"the memory timeline of rank {rank}", lambda: self._write_memory(rank))
        peak = None if self.memory is None else sum(self.memory.peak[1:])
        before_s = self._ended[self.first] - self._ended[self.first - 1] if self.done >= self.first else None
        return RankProfile(rank, times, peak, before_s, tuple(self.problems))

    def _trace(self, rank: int) -> RankTime | None:
        """Export to a temporary file, analyse that, and keep it compressed in the run's folder."""
        found: RankTime | None = None
        kept = None if self.out is None else self.out / TRACES / f"rank{rank}.json.gz"

        def export() -> None:
            nonlocal found
            with tempfile.TemporaryDirectory(prefix="ultrascale-") as folder:
                raw = Path(folder) / f"rank{rank}.json"
                self._profile.export_chrome_trace(str(raw))
                found = trace_times.analyse(trace_rank.read(raw))
                if kept is not None:
                    self._try_write(f"the trace of rank {rank}", lambda: _compress(raw, kept))

        self._try_write(f"the trace of rank {rank}", export)
        return None if found is None else replace(found, file=str(kept) if kept is not None and kept.exists() else "")

    def _write_memory(self, rank: int) -> None:
        if self.out is None or self.memory is None:
            return
        folder, capacity = self.out / MEMORY, self.engine.job.cluster.gpu.memory_gib * GIB
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"rank{rank}.json", json.dumps(self.memory.as_json(capacity)) + "\n")
        where = self.engine.mesh.place.words(self.engine.mesh.layout)
        title = f"{self.engine.job.model.name}, rank {rank}{f' ({where})' if where else ''}: memory of one step by owner"
        write_text(folder / f"rank{rank}.svg", profile_memory.draw(self.memory, title, capacity))
        if self.memory.snapshot is not None:
            with (folder / f"rank{rank}.pickle").open("wb") as file:
                pickle.dump(self.memory.snapshot, file)  # as torch's _dump_snapshot: pytorch.org/memory_viz shows it

    def _try_write(self, what: str, write: Callable[[], None]) -> None:
        """Run something that writes; a failure is a problem to report, and loses no result."""
        try:
            write()
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk is full" if full else os_reason(error)
            self.problems.append(f"{what} could not be written ({reason}): make room, or give another --out")
        except (SpecError, RuntimeError) as error:
            self.problems.append(f"{what}: {error}")


def _compress(raw: Path, kept: Path) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    try:
        with raw.open("rb") as source, gzip.open(kept, "wb", compresslevel=5) as target:
            shutil.copyfileobj(source, target)
    except OSError:
        kept.unlink(missing_ok=True)  # half a trace would look like one that was cut off
        raise


def facts(engine: Engine) -> dict[str, Any]:
    """Metadata of the run, stored in each trace."""
    job, mesh = engine.job, engine.mesh
    return {
        "version": __version__,
        "model": job.model.name,
        "layers": job.model.layers,
        "parameters": job.model.parameters,
        "seq": job.seq,
        "precision": job.precision,
        "layout": mesh.layout.model_dump(mode="json"),
        "place": {"pp": mesh.place.pp, "dp": mesh.place.dp, "cp": mesh.place.cp, "tp": mesh.place.tp},
        "cuda_graphs": engine.cuda_graphs is not None and engine.cuda_graphs.used,
        "train_graphs": engine.training.graphs,
        "gradient_bytes": sum(one.nbytes for chunk in engine.pipeline.chunks.values() for one in chunk.gradients.allocated()),
    }


def combine_ranks(run: Run) -> Analysis:
    """The traces of all ranks together, beside the prediction for this machine."""
    ranks: list[RankProfile] = run.outcome.observed
    times = [one.times for one in ranks if one.times is not None]
    problems = [problem for one in ranks for problem in one.problems]
    if run.outcome.stopped is not None:
        problems.append(f"the run was stopped by {run.outcome.stopped} after step {run.outcome.step}")
    if not times:
        raise RunError(f"nothing was profiled: {'; '.join(problems) or 'no step was recorded'}")
    request, plan = run.request, None
    if run.predicted is not None:
        plan = Plan(job=request.job, layout=request.layout, estimate=run.predicted)
    return analyse(times, plan, [*problems, *_overhead_notes(ranks), *_files(run, ranks)])


def _overhead_notes(ranks: list[RankProfile]) -> Iterator[str]:
    first = ranks[0]
    if first.before_s is not None and first.times is not None:
        recorded_s = first.times.mean("step_s")
        yield f"recording costs time too: {seconds(first.before_s)} in the step before, {seconds(recorded_s)} while recording"


def _files(run: Run, ranks: list[RankProfile]) -> Iterator[str]:
    if run.folder is None:
        return
    peak = max((one.peak_bytes for one in ranks if one.peak_bytes is not None), default=0.0)
    on_gpu = run.outcome.measured is not None and run.outcome.measured.device != "cpu"
    snapshot = "beside it PyTorch's snapshot (pytorch.org/memory_viz)" if on_gpu else "a CPU has no snapshot of an allocator"
    kept = sum(one.times is not None and bool(one.times.file) for one in ranks)
    if kept:
        yield f"{kept} {'trace' if kept == 1 else 'traces'} in {run.folder / TRACES}, for ui.perfetto.dev"
    yield f"memory by owner over one step is in {run.folder / MEMORY}, {peak / GIB:,.3f} GiB at the peak; {snapshot}"
