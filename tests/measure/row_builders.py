"""Rows of a runs file, written by hand, and runs and predictions from them."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ultrascale.measure.accuracy.runs import MeasuredRun, read_row
from ultrascale.measure.accuracy.scores import ScoredRun

PUBLISHED = Path(__file__).resolve().parents[2] / "data" / "published.csv"

# A row with every cell; minimal rows are built by removing cells.
FULL = {
    "id": "full",
    "source": "someone/runs README.md",
    "system": "torchtitan FSDP2",
    "model": "Llama-3-8B",
    "seq_len": "4096",
    "gpu": "H100-80GB",
    "gpus": "8",
    "gpus_per_node": "8",
    "dp": "8",
    "zero_stage": "3",
    "micro_batch": "1",
    "grad_accum": "4",
    "recompute": "none",
    "precision": "bf16",
    "attention_impl": "SDPA flash",
    "compile": "yes",
    "tokens_per_s_per_gpu": "11000",
    "iter_time_s": "",
    "peak_mem_gib": "",
    "notes": "",
    "status": "ok",
    "mem_kind": "",
    "trust": "A",
}


def row(**cells: object) -> dict[str, str]:
    return {**FULL, **{name: str(value) for name, value in cells.items()}}


def run(**cells: object) -> MeasuredRun:
    return read_row(row(**cells), 2)


def scored(
    predicted: float | None = 10_000.0, peak: float | None = 50.0, fits: bool | None = True, **cells: object
) -> ScoredRun:
    """A fake prediction: the tests check what is computed from it."""
    parsed = run(**cells)
    assert parsed.reason is None, parsed.reason
    return ScoredRun(parsed, None, predicted, 1.0, peak, fits, None)


def write(path: Path, *rows: Mapping[str, Any]) -> Path:
    names = list(dict.fromkeys(name for one in rows for name in one))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return path
