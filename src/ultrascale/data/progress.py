"""Progress of a tokenization job: documents, tokens, bytes, rates and remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ultrascale.data.input_parts import InputPart
from ultrascale.data.worker_pool import WorkerReport, WorkerTask


@dataclass(frozen=True)
class TokenizeProgress:
    """The progress of a job; rates are those of the current launch."""

    documents: int
    tokens: int
    bytes: int
    total_bytes: int
    bytes_before: int
    """read by earlier launches that did not finish"""
    tokens_before: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return (self.bytes - self.bytes_before) / max(self.seconds, 1e-9)

    @property
    def tokens_per_s(self) -> float:
        return (self.tokens - self.tokens_before) / max(self.seconds, 1e-9)

    @property
    def eta_s(self) -> float | None:
        rate = self.bytes_per_s
        return (self.total_bytes - self.bytes) / rate if rate > 0 else None


Report = Callable[[TokenizeProgress], None]


class ProgressMeter:
    """Sums the reports of workers into a progress report."""

    def __init__(self, parts: Sequence[InputPart], done: int, tokens: int, documents: int, report: Report | None) -> None:
        self.documents, self.tokens, self.report = documents, tokens, report
        self.total = sum(part.cost for part in parts)
        self.bytes = self.bytes_before = sum(part.cost for part in parts[:done])
        self.tokens_before = tokens
        self.started = time.monotonic()
        self.unfinished: dict[int, WorkerReport] = {}
        self._send()

    def update(self, worker_report: WorkerReport) -> None:
        self.unfinished[worker_report.number] = worker_report
        self._send()

    def part_appended(self, task: WorkerTask, documents: int, tokens: int) -> None:
        """Called when a part has been appended, with the new totals."""
        self.bytes += task.part.cost
        if self.unfinished.pop(task.number, None) is None:  # tokenized by an earlier launch
            self.bytes_before += task.part.cost
            self.tokens_before += tokens - self.tokens
        self.documents, self.tokens = documents, tokens
        self._send()

    def _send(self) -> None:
        if self.report is None:
            return
        unfinished = self.unfinished.values()
        self.report(
            TokenizeProgress(
                documents=self.documents + sum(worker_report.documents for worker_report in unfinished),
                tokens=self.tokens + sum(worker_report.tokens for worker_report in unfinished),
                bytes=self.bytes + sum(worker_report.place for worker_report in unfinished),
                total_bytes=self.total,
                bytes_before=self.bytes_before,
                tokens_before=self.tokens_before,
                seconds=time.monotonic() - self.started,
            )
        )
