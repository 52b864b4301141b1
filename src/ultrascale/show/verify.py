"""Output of `ultrascale verify`: layouts and programs against one process, and the pairs of features that ran together."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from ultrascale.measure.verify_programs import Launch, ProgramGenerator

if TYPE_CHECKING:
    from ultrascale.measure.verify import Difference
    from ultrascale.measure.verify_runs import ProgramResult

WIDTH = 80
COLUMNS = string.ascii_lowercase + string.ascii_uppercase + string.digits


HEADING = "largest difference over its bound (up to 1 is rounding), layout"


def layout_row(difference: Difference) -> str:
    if difference.problem:
        return f"DIFFERS  {difference.layout}: {difference.problem}" + _where(difference.where)
    row = f"{_mark(difference.ok)} {difference.excess:7.2g}  {difference.layout}"
    if difference.ok:
        return row
    errors = f"\n    loss off by {difference.loss_error:.1e}, gradients by {difference.grad_error:.1e}"
    return row + errors + _where(difference.where or difference.worst)


def _mark(ok: bool) -> str:
    return "ok" if ok else "DIFFERS"


def _where(text: str) -> str:
    return f"\n    first difference: {text}" if text else ""


def layouts_json(differences: Sequence[Difference]) -> dict[str, Any]:
    return {
        "layouts": [
            {
                "layout": one.layout.model_dump(mode="json"),
                "loss_error": _finite(one.loss_error),
                "grad_error": _finite(one.grad_error),
                "over_bound": _finite(one.excess),
                "ok": one.ok,
                "worst": one.worst,
                "where": one.where or None,
                "problem": one.problem or None,
            }
            for one in differences
        ]
    }


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None


def program_row(verdict: ProgramResult) -> str:
    """A program's answer in a line, and its launches in one each."""
    program = verdict.program
    kind = " ".join([program.model, program.precision, program.optimizer, *program.training])
    problem = "" if verdict.ok else f"\n    {verdict.problem or verdict.difference}"
    launches = "".join(f"\n    {line}" for launch in program.launches for line in _launch(launch))
    return f"{_mark(verdict.ok)} {verdict.excess:7.2g}  {verdict.seconds:5.1f} s  {kind}{launches}{problem}"


def _launch(launch: Launch) -> list[str]:
    begin = "" if launch.roll_back is None else f"roll back to {launch.roll_back}, "
    ending = launch.ending()
    return wrap(f"{begin}{launch.layout}{f', {ending}' if ending else ''}", 74, subsequent_indent="    ")


def failure(verdict: ProgramResult, folder: Path) -> Iterator[str]:
    """A failed program as commands that repeat it."""
    file, model = verdict.program.save(folder)
    yield f"The shortest program that still fails is in {file}. It differs first in {verdict.difference or verdict.problem}"
    if verdict.where:
        yield f"The first module that differs: {verdict.where}"
    yield f"Run it again:  ultrascale verify --program {file}"
    yield "Or step by step:"
    yield from (f"  {line}" for line in verdict.program.commands(folder / "run", model))


RUNS_HEADING = "largest difference over its bound (up to 1 is rounding), seconds, program"


def coverage(drawing: ProgramGenerator) -> Iterator[str]:
    """Which features ran together, and how often: a triangle with one character for each pair."""
    features = sorted({feature for pair in drawing.possible for feature in pair})
    width = min(max(map(len, features), default=0), WIDTH - 3 - len(features))
    letters = dict(zip(features, COLUMNS, strict=False))
    covered = sum(pair in drawing.covered for pair in drawing.possible)
    yield f"{covered:,} pairs of features ran together, of {len(drawing.possible):,} that were drawn:"
    yield "programs with both, 9 or more as 9; 0: drawn but not run; ·: never together"
    yield f"{'':{width}}   {''.join(letters.get(feature, '?') for feature in features)}"
    for number, feature in enumerate(features):
        cells = [_cell(drawing, (other, feature)) for other in features[:number]]
        yield f"{feature:{width}.{width}} {letters.get(feature, '?')} {''.join(cells)}".rstrip()


def _cell(drawing: ProgramGenerator, pair: tuple[str, str]) -> str:
    if pair in drawing.covered:
        return str(min(9, drawing.covered[pair]))
    return "0" if pair in drawing.possible else "·"


def programs_json(verdicts: Sequence[ProgramResult], covered: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    return {
        "programs": [
            {
                "program": one.program.model_dump(mode="json", exclude_defaults=True),
                "ok": one.ok,
                "over_bound": _finite(one.excess),
                "worst": one.worst,
                "difference": one.difference or None,
                "where": one.where or None,
                "problem": one.problem or None,
                "seconds": round(one.seconds, 2),
            }
            for one in verdicts
        ],
        "pairs": [{"features": list(pair), "programs": count} for pair, count in sorted(covered.items())],
    }
