"""Metrics of a step: metrics.jsonl, the loggers of `train.log`, and a progress line."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ultrascale.cost import flops
from ultrascale.specs.batch_ramp import BatchRamp
from ultrascale.specs.errors import SpecError
from ultrascale.specs.folders import METRICS, sync_folder
from ultrascale.specs.layout import Layout
from ultrascale.specs.units import GIB
from ultrascale.train.sinks import OptionalSink, open_sinks

if TYPE_CHECKING:
    from ultrascale.train.engine import StepResult
    from ultrascale.train.request import Request

FIRST_LINES = 5  # steps that a pipe shows one by one, so that a bad start is visible at once
REDRAW_S = 0.5
RECENT = 20  # steps whose mean time gives the ETA
DROPPED_WHEN_NARROW = (
    "data",
    "checkpoint",
    "lr",
    "load",
    "peak",
    "norm",
    "dropped",
    "eval",
    "mfu",
    "eta",
)  # left out of a narrow progress line


@dataclass(frozen=True)
class StepRecord:
    """The metrics of one optimizer step. The fields after `peak_gib` are written only if they are known."""

    step: int
    """steps completed, this one included"""
    tokens: int
    """trained on since the first step of the run"""
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s_per_gpu: float
    mfu: float | None
    """with causal attention (`Job.mfu_convention`); None if the peak of the hardware is unknown"""
    peak_gib: float | None
    data_wait_s: float | None = None
    step_time_s: float | None = None
    skipped: bool | None = None
    """the loss scale was too high and no update was made"""
    loss_scale: float | None = None
    eval_loss: float | None = None
    checkpoint_s: float | None = None
    """how long checkpoints have blocked training since the last row"""
    z_loss: float | None = None
    """with train.z_loss: what is added to the loss"""
    mtp_loss: float | None = None
    """with model.mtp_depth: the mean cross-entropy of the tokens after the next"""
    balance_loss: float | None = None
    """mean over sequences and MoE layers; 1 is perfectly balanced"""
    expert_load: tuple[float, ...] | None = None
    """per MoE layer, the tokens of the busiest expert divided by the mean"""
    expert_tokens: tuple[tuple[int, ...], ...] | None = None
    """per MoE layer, the tokens of each expert"""
    expert_quantiles: tuple[tuple[int, ...], ...] | None = None
    """instead of `expert_tokens` if there are many experts: minimum, quartiles and maximum of the tokens per expert"""
    dropped_tokens: int | None = None
    """choices of a token dropped because the expert was at capacity"""

    def values(self) -> dict[str, Any]:
        """The fields in order, for JSON: values that are not finite are None."""
        known = {name: value for name, value in asdict(self).items() if value is not None or name in _ALWAYS}
        return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in known.items()}


_NO_CURVE = ("step", "expert_tokens", "expert_quantiles")
_ALWAYS = [field.name for field in fields(StepRecord) if field.default is MISSING]


class MetricsLog:
    """Writes metrics.jsonl in a run's folder, one complete line per record, and the other sinks."""

    def __init__(self, folder: Path, resume_step: int | None = None, sinks: Iterable[OptionalSink] = ()) -> None:
        """`resume_step`: the checkpoint's step of a resumed run; later rows are deleted, since their steps are repeated."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS
        if self.path.exists() and not self.path.is_file():  # opening a FIFO would block
            raise SpecError(f"{self.path} is not a regular file: move it away, or give another --out")
        if resume_step is not None and self.path.exists():
            write_rows(self.path, rows_through(self.path, resume_step))
        self._file = self.path.open("w" if resume_step is None else "a", encoding="utf-8")
        self._sinks = tuple(sinks)

    def write(self, record: StepRecord) -> None:
        self._file.write(json.dumps(record.values(), allow_nan=False) + "\n")
        self._file.flush()
        for sink in self._sinks:
            sink.write(record.step, _curves(record))

    def sync(self) -> None:
        """Flushes the rows to the disk: a checkpoint must not exist without the rows of its steps."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()


def rows_through(path: Path, step: int) -> list[str]:
    """The lines of a metrics file up to this step, without a truncated last line."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [line for line in lines if step_of_row(line) <= step]


def write_rows(path: Path, rows: Iterable[str]) -> None:
    """Replaces the file atomically, with its bytes synced to the disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(row + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def step_of_row(line: str) -> float:
    """The step of a line; infinity if the line is not a record."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return math.inf


def _curves(record: StepRecord) -> dict[str, float]:
    values = {name: value for name, value in record.values().items() if name not in _NO_CURVE and value is not None}
    return {name: max(value) if isinstance(value, tuple) else float(value) for name, value in values.items()}


class ProgressLine:
    """Shows steps on a stream: one rewritten line on a terminal, a line now and then in a pipe."""

    def __init__(
        self,
        stream: TextIO,
        total: int,
        work: Callable[[int], int] = lambda step: step,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`work`: of the steps done so far, such as tokens; the time left is that of the work left."""
        self._stream, self._total, self._work, self._clock = stream, total, work, clock
        self._terminal = stream.isatty()
        self._shown_at = -math.inf
        self._first: int | None = None
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT + 1)

    def show(self, record: StepRecord) -> None:
        now = self._clock()
        self._first = record.step if self._first is None else self._first
        self._recent.append((record.step, now))
        if not self._due(record.step, now):
            return
        self._shown_at = now
        width = shutil.get_terminal_size().columns - 1 if self._terminal else None
        line = progress_line(record, self._total, self._left_s(record), width)
        if self._terminal:
            self._stream.write("\r" + line[:width] + "\x1b[K" + ("\n" if record.step == self._total else ""))
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Ends the line of a run that ended before its last step."""
        if self._terminal and self._recent and self._recent[-1][0] < self._total:
            self._stream.write("\n")

    def _due(self, step: int, now: float) -> bool:
        assert self._first is not None
        if step == self._total:
            return True
        if self._terminal:
            return now - self._shown_at >= REDRAW_S
        return step - self._first < FIRST_LINES or step % max(1, self._total // 10) == 0

    def _left_s(self, record: StepRecord) -> float | None:
        (old, then), (new, now) = self._recent[0], self._recent[-1]
        if new == old:
            old, passed = new - 1, record.step_time_s
        else:
            passed = now - then
        left = self._work(self._total) - self._work(new)
        return None if passed is None else passed / (self._work(new) - self._work(old)) * left


def progress_line(record: StepRecord, total_steps: int, eta_s: float | None, width: int | None = None) -> str:
    """`step 12/200 · loss 2.341 · norm 1.02 · …`; unknown values are left out, and what matters least in a narrow terminal."""
    peak, load = record.peak_gib, record.expert_load
    values = {
        "step": f"step {record.step}/{total_steps}",
        "loss": f"loss {record.loss:.3f}",
        "eval": None if record.eval_loss is None else f"eval {record.eval_loss:.3f}",
        "norm": f"norm {record.grad_norm:.2f}",
        "lr": f"lr {record.lr:.1e}",
        "speed": f"{_thousands(record.tokens_per_s_per_gpu)} tokens/s/GPU",
        "mfu": None if record.mfu is None else f"MFU {record.mfu * 100:.1f} %",
        "peak": None if peak is None else f"peak {peak:.2f} GiB" if peak >= 0.1 else f"peak {peak * 1024:.1f} MiB",
        "data": None if record.data_wait_s is None else f"data {record.data_wait_s * 1e3:.1f} ms",
        "load": None if load is None else f"busiest expert {max(load):.2f}×",
        "dropped": f"dropped {record.dropped_tokens:,}" if record.dropped_tokens else None,
        "skipped": "skipped" if record.skipped else None,
        "checkpoint": None if record.checkpoint_s is None else f"checkpoint {record.checkpoint_s * 1e3:.1f} ms",
        "eta": None if eta_s is None else f"ETA {duration(eta_s)}",
    }
    words = {name: word for name, word in values.items() if word}
    for name in DROPPED_WHEN_NARROW:
        if width is not None and len(" · ".join(words.values())) > width:
            words.pop(name, None)
    return " · ".join(words.values())


def batch_line(layout: Layout, seq: int, ramp: str | None = None, lengths: str | None = None) -> str:
    """The global batch in sequences and tokens, its factors, the smaller batches of train.batch_ramp and the shorter sequences
    of train.seq_stages.
    """
    sequences = layout.mbs * layout.dp * layout.gas
    noun = "sequence" if sequences == 1 else "sequences"
    factors = f"mbs {layout.mbs} × dp {layout.dp} × gas {layout.gas}"
    line = f"batch: {sequences:,} {noun} × {seq} = {layout.batch_tokens(seq):,} tokens ({factors})"
    stages = BatchRamp.of(ramp, seq, sequences, lengths)
    line += f"; ramp: {stages} tokens a step" if ramp else ""
    return f"{line}; sequences: {stages.lengths} tokens" if lengths else line


def duration(value_s: float) -> str:
    """`20 s`, `1 min 20 s`, `2 h 5 min`, `3 d 4 h`: two units are enough to plan with."""
    whole = round(value_s)
    for large, small, size, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size} {large} {whole % size // part} {small}"
    return f"{whole} s"


def _thousands(value: float) -> str:
    if not math.isfinite(value) or value < 1000:
        return f"{value:.0f}"
    return f"{value / 1e3:.1f}k" if value < 1e6 else f"{value / 1e6:.2f}M"


class MetricsRecorder:
    """Writes rank 0's metrics: metrics.jsonl, other sinks, the progress line."""

    def __init__(self, request: Request, out: Path | None, peak_flops: float | None, quiet: bool, start: int = 0) -> None:
        """`start`: steps done before this launch."""
        self.request = request
        layout, job = request.layout, request.job
        training, sequences = request.training, layout.mbs * layout.dp * layout.gas
        self.ramp = BatchRamp.of(training.batch_ramp, job.seq, sequences, training.seq_stages)
        per_token = {stage.seq: flops.model_flops(job.model, stage.seq, causal=True) for stage in self.ramp.stages}
        self.mfu: Callable[[float, int], float | None]
        self.mfu = lambda rate, seq: rate * per_token[seq] / peak_flops if peak_flops else None
        sinks = open_sinks(request.training.log, out, {"layout": str(layout), "model": job.model.name}) if out else []
        self.log = MetricsLog(out, start if request.continues_in(out) else None, sinks) if out else None
        self.progress = None if quiet else ProgressLine(sys.stderr, request.training.steps, self.ramp.tokens_before)

    def record(
        self,
        done: int,
        result: StepResult,
        step_s: float,
        data_s: float,
        eval_loss: float | None,
        loss_scale: float | None,
        checkpoint_s: float | None,
    ) -> None:
        loads = result.loads
        rate = self.ramp.tokens(done - 1) / step_s / self.request.layout.gpus
        record = StepRecord(
            step=done,
            tokens=self.ramp.tokens_before(done),
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens_per_s_per_gpu=rate,
            mfu=self.mfu(rate, self.ramp.at(done - 1).seq),
            peak_gib=peak_bytes() / GIB,
            data_wait_s=data_s,
            step_time_s=step_s,
            skipped=result.skipped or None,
            loss_scale=loss_scale,
            eval_loss=eval_loss,
            checkpoint_s=checkpoint_s,
            z_loss=result.z_loss,
            mtp_loss=result.mtp_loss,
            balance_loss=loads.balance_loss if loads else None,
            expert_load=loads.busiest if loads else None,
            expert_tokens=loads.per_expert if loads else None,
            expert_quantiles=loads.quantiles if loads else None,
            dropped_tokens=loads.dropped if loads else None,
        )
        if self.log is not None and done % self.request.training.log_every == 0:
            self.log.write(record)
        if self.progress is not None:
            self.progress.show(record)

    def sync(self) -> None:
        if self.log is not None:
            self.log.sync()

    def close(self) -> None:
        if self.log is not None:
            self.log.close()
        if self.progress is not None:
            self.progress.close()


def peak_bytes() -> int:
    """Peak memory of this process: allocated on the GPU, or resident on the host."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
