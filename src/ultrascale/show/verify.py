"""Output of `ultrascale verify`: layouts, programs and dumps, and the pairs of features that ran together."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from ultrascale.measure.verify_programs import Launch, ProgramGenerator

if TYPE_CHECKING:
    from ultrascale.measure.verify import Difference
    from ultrascale.measure.verify_dumps import DumpComparison, DumpSide, TensorDifference
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
    return value if value < float("inf") else None  # nan too


def program_row(verdict: ProgramResult) -> str:
    """A program's answer in a line, and its launches in one each."""
    program = verdict.program
    kind = " ".join([program.model, program.precision, program.optimizer, *(["ema"] if program.ema else []), *program.training])
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


_SECTIONS = {
    "weight": ("weight of", "weights"),
    "forward": ("forward output of", "module outputs"),
    "loss": ("loss", "losses"),
    "backward": ("gradient by the output of", "gradients by module outputs"),
    "gradient": ("gradient of", "parameter gradients"),
}
MOST_NAMES = 4


def dumps_report(found: DumpComparison) -> Iterator[str]:
    """Two dumps compared: what was compared, what was not, and the first difference."""
    yield from _fold(f"first:  {_side(found.first)}", 8)
    yield from _fold(f"second: {_side(found.second)}", 8)
    counts = ", ".join(_counted(section, count) for section, count in found.compared.items())
    steps = f"step {found.steps[0]}" if len(found.steps) == 1 else f"steps {', '.join(map(str, found.steps))}"
    yield from _fold(f"compared in {steps}: {counts}")
    if found.sampled:
        yield from _fold(f"note: {found.sampled:,} of them by a sample of their entries, since they exceed max_bytes", 6)
    for side, keys in (("first", found.only_first), ("second", found.only_second)):
        if keys:
            yield from _fold(f"note: only the {side} has {len(keys):,} tensors: {_patterns(keys)}", 6)
    if found.other_shapes:
        yield from _fold(f"note: {len(found.other_shapes):,} outputs have other shapes: {found.other_shapes[0]}", 6)
    bounds = "measured" if found.measured_bounds else "by format and depth"
    if found.ok:
        yield from _fold(f"ok {found.excess:.2g}  largest difference over its bound ({bounds}); up to 1 is rounding")
        return
    total = len(found.names)
    yield f"DIFFERS {found.excess:.2g}  {len(found.differences):,} of {total:,} tensors; bounds {bounds}"
    first = found.differences[0]
    yield from _fold(f"first difference: {where(first)}", 4, 4)
    yield from _fold(
        f"off by {first.error.largest:.1e} of its largest entry (bound {first.bound:.1e}), {first.largest:.2g} at most, "
        f"{first.error.rms:.1e} in relative norm",
        4,
        4,
    )
    for sentence in first.pattern.sentences():
        yield from _fold(f"{sentence[:1].upper()}{sentence[1:]}.", 4, 4)
    for sentence in summary(found):
        yield from _fold(sentence)


def where(difference: TensorDifference) -> str:
    """The step and tensor of a difference."""
    other = difference.first_name
    both = f" ({other} in the first)" if other != difference.name else ""
    return f"step {difference.step}, {_SECTIONS[difference.section][0]} {difference.name}".rstrip() + both


def summary(found: DumpComparison) -> Iterator[str]:
    """What the differences of each section have in common: names, a factor, ranks."""
    for section, (_, title) in _SECTIONS.items():
        wrong = [one for one in found.differences if one.section == section]
        everything = Counter(_pattern(name) for other, name in found.names if other == section)
        if not wrong or section == "loss":
            continue
        counts = Counter(_pattern(one.name) for one in wrong)
        text = f"{title}: {len(wrong):,} of {everything.total():,} differ"
        if len(wrong) < everything.total():
            names = [f"{name} ({count} of {everything[name]})" for name, count in counts.items()]
            text += f": {_first(names)}"
        factors = {f"{one.pattern.factor:.3g}" for one in wrong if one.pattern.factor is not None}
        if len(factors) == 1 and len(wrong) > 1 and all(one.pattern.factor is not None for one in wrong):
            text += f"; each by the same factor: {wrong[0].pattern.factor_words}"
        ranks = {one.pattern.ranks for one in wrong}
        if len(ranks) == 1 and len(wrong) > 1 and (same := ranks.pop()):
            text += f"; each time {same}"
        yield text


def _counted(section: str, count: int) -> str:
    words = _SECTIONS[section][1]
    return f"{count:,} {'loss' if (section, count) == ('loss', 1) else words}"


def _side(side: DumpSide) -> str:
    mesh = " ".join(f"{axis}{size}" for axis, size in side.axes.items())
    ranks = f"{side.world} rank{'s' if side.world > 1 else ''}{f' ({mesh})' if mesh else ''}"
    return f"{side.folder}, {ranks}" + (f", {side.program}" if side.program != Path(side.folder).name else "")


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "{}", name)


def _patterns(keys: Sequence[str]) -> str:
    counts = Counter(_pattern(key) for key in keys)
    return _first([f"{name} ({count})" if count > 1 else name for name, count in counts.items()])


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")


def _fold(text: str, indent: int = 4, first: int = 0) -> list[str]:
    return wrap(text, WIDTH, initial_indent=" " * first, subsequent_indent=" " * indent, break_on_hyphens=False)


def dumps_json(found: DumpComparison) -> dict[str, Any]:
    return {
        "first": vars(found.first),
        "second": vars(found.second),
        "steps": list(found.steps),
        "compared": dict(found.compared),
        "sampled": found.sampled,
        "only_first": list(found.only_first),
        "only_second": list(found.only_second),
        "other_shapes": list(found.other_shapes),
        "ok": found.ok,
        "over_bound": _finite(found.excess),
        "worst": found.worst,
        "measured_bounds": found.measured_bounds,
        "differences": [
            {
                "step": one.step,
                "section": one.section,
                "name": one.name,
                "first_name": one.first_name,
                "error": _finite(one.error.largest),
                "relative_norm": _finite(one.error.rms),
                "largest": _finite(one.largest),
                "bound": one.bound,
                "over_bound": _finite(one.excess),
                "factor": one.pattern.factor,
                "sentences": one.pattern.sentences(),
            }
            for one in found.differences
        ],
        "summary": list(summary(found)),
    }
