"""How far a tokenizing job is: documents, tokens, bytes, rates and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ultrascale.data.input_parts import InputPart
from ultrascale.data.worker_pool import WorkerReport, WorkerTask


@dataclass(frozen=True)
class TokenizeProgress:
    """How far a job is; rates are those of this start of it."""

    documents: int
    tokens: int
    bytes: int
    total_bytes: int
    bytes_before: int
    """read by an earlier start that was ended"""
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
    """Adds up what workers say into a progress to report."""

    def __init__(self, parts: Sequence[InputPart], done: int, tokens: int, documents: int, report: Report | None) -> None:
        self.documents, self.tokens, self.report = documents, tokens, report
        self.total = sum(part.cost for part in parts)
        self.bytes = self.bytes_before = sum(part.cost for part in parts[:done])
        self.tokens_before = tokens
        self.started = time.monotonic()
        self.partly: dict[int, WorkerReport] = {}
        self._tell()

    def saw(self, said: WorkerReport) -> None:
        self.partly[said.number] = said
        self._tell()

    def kept(self, task: WorkerTask, documents: int, tokens: int) -> None:
        """A part has been appended; so much is there now."""
        self.bytes += task.part.cost
        if self.partly.pop(task.number, None) is None:  # an earlier start made it
            self.bytes_before += task.part.cost
            self.tokens_before += tokens - self.tokens
        self.documents, self.tokens = documents, tokens
        self._tell()

    def _tell(self) -> None:
        if self.report is None:
            return
        partly = self.partly.values()
        self.report(
            TokenizeProgress(
                documents=self.documents + sum(said.documents for said in partly),
                tokens=self.tokens + sum(said.tokens for said in partly),
                bytes=self.bytes + sum(said.place for said in partly),
                total_bytes=self.total,
                bytes_before=self.bytes_before,
                tokens_before=self.tokens_before,
                seconds=time.monotonic() - self.started,
            )
        )
