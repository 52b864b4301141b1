"""Words of users on a terminal: control characters are shown as pictures, and no markup is read from them."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from rich.table import Table

from builders import make_job
from ultrascale.measure.accuracy.runs import read
from ultrascale.measure.accuracy.scores import ScoredRun, score
from ultrascale.measure.bench_collectives import CollectivesReport, CollectiveTiming
from ultrascale.measure.bench_ladders import Figures, Ladder, Rung
from ultrascale.measure.compare import ComparedTerm
from ultrascale.measure.trace_analysis import Analysis
from ultrascale.measure.trace_times import RankTime, StepTime, TechniqueTime
from ultrascale.plan import plan
from ultrascale.plan.what_if import largest, what_if
from ultrascale.show import accuracy, bench, compare, explain, lines, presets, profile
from ultrascale.show.lines import PlainConsole, bullets, labelled
from ultrascale.show.plan import show_result
from ultrascale.specs.folders import folder_name
from ultrascale.specs.printable import printable

Run = Callable[..., tuple[int, str, str]]
PUBLISHED = Path(__file__).resolve().parents[1] / "data" / "published.csv"

ATTACK = "a\x1b[2J\x1b]0;owned\x07\x9b31m\x7f\r\x08[bold red]b[/]:boom:\u202e"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def test_control_characters_are_replaced_by_visible_symbols() -> None:
    assert printable("a\x1b[2J\x07\x7f\x9b\u202e") == "a␛[2J␇␡��"
    assert printable("two\nlines\tand tabs, ·×█ 日本") == "two\nlines\tand tabs, ·×█ 日本"
    assert not OBEYED.search(printable("".join(map(chr, range(0x3000)))))


def test_a_console_escapes_user_text_and_keeps_its_own_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    console = PlainConsole(width=200)
    console.file = io.StringIO()
    table = Table(title=ATTACK)
    table.add_column(ATTACK)
    table.add_row(ATTACK)
    console.print(table)
    console.print(ATTACK, style="bold")
    labelled(console, "note:", "red", ATTACK)
    bullets(console, [ATTACK])
    printed = console.file.getvalue()
    assert "\x1b[1m" in printed
    without_styles = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    assert not OBEYED.search(without_styles)
    assert without_styles.count("␛[2J␛]0;owned") == 6
    assert without_styles.count("[bold red]b[/]:boom:�") == 6


@pytest.mark.parametrize("words", [[], ["--json"]], ids=["table", "json"])
def test_model_names_are_escaped_in_the_terminal(run: Run, tmp_path: Path, words: list[str]) -> None:
    model = {"name": ATTACK, "layers": 4, "hidden": 512, "heads": 8, "ffn": 1024, "vocab": 1000}
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(model))
    options = ["--cluster=1xh100", "--batch-tokens=8k", "--seq=1024", "--top=1"]
    code, out, err = run("plan", tmp_path / "m.yaml", *options, "-o", tmp_path / "p.yaml", *words)
    assert code == 0, err
    assert not OBEYED.search(out + err)
    code, out, err = run("explain", tmp_path / "p.yaml", *words)
    assert (code, OBEYED.search(out + err)) == (0, None)
    if words:
        assert json.loads(out)["job"]["model"]["name"] == ATTACK
    assert yaml.safe_load((tmp_path / "p.yaml").read_text())["job"]["model"]["name"] == ATTACK


def test_an_argument_with_control_characters_is_refused(run: Run) -> None:
    for words in (["--\x1b[31m"], ["presets", "\x1b]0;x\x07"], ["\x9b2J"], ["train", "layout.\x08tp=2"]):
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert err.startswith("error: the argument '")
        assert "has a control character" in err
        assert not OBEYED.search(err)


def test_an_error_that_quotes_a_file_is_printed_without_its_escapes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text(f"id,model,seq_len,gpu,gpus\n{ATTACK.replace(chr(13), '')},no-model,1,h100,8\n")
    code, out, err = run("accuracy", tmp_path / "runs.csv")
    assert code == 2
    assert "none of the 1 rows" in err
    assert not OBEYED.search(out + err)


def test_a_folder_name_is_sanitized() -> None:
    assert folder_name("llama-3.2-1b") == "llama-3.2-1b"
    assert folder_name("meta/../../Llama 3\x1b[2J") == "meta-..-..-Llama-3--2J"
    assert folder_name("..") == "model"
    assert len(folder_name("x" * 1000)) == 100


# ------------------------------------------------------------------------------------------------------------------ widths


class RecordingConsole(PlainConsole):
    """A console of some width that keeps every table it is given."""

    def __init__(self, width: int) -> None:
        super().__init__(width=width)
        self.file = io.StringIO()
        self.tables: list[tuple[Table, str]] = []

    @property
    def is_terminal(self) -> bool:
        return True

    def print(self, *objects: Any, **options: Any) -> None:
        before = len(self.file.getvalue())  # type: ignore[attr-defined]
        super().print(*objects, **options)
        printed = re.sub(r"\x1b\[[0-9;]*m", "", self.file.getvalue()[before:])  # type: ignore[attr-defined]
        self.tables += [(one, printed) for one in objects if isinstance(one, Table)]


def words_of(grid: Table) -> Iterator[str]:
    """Of cells and headings; where cells are lines of their own, the first column needs no heading."""
    for number, column in enumerate(grid.columns):
        for cell in (column.header if number else "", *column.cells):
            yield from str(cell).split()


@pytest.fixture(scope="module")
def outputs() -> dict[str, Callable[[Console], object]]:
    """The widest output of each verb of planning: experts, deep pipelines, long names."""
    dense = plan(make_job("llama-3-70b", "64xh100", seq=8192, batch=512, framework="megatron-core"))
    experts = plan(make_job("qwen3-30b-a3b", "32xh100", seq=4096, batch=1024, framework="megatron-core"))
    nothing = plan(make_job("llama-3-8b", "1xrtx4090", seq=4096, batch=32))
    best = dense.plans[0]
    changes = [what_if(best, text) for text in ("zero=3", "gpus=128")]
    rows = accuracy_rows()
    return {
        "plan": lambda console: show_result(console, dense),
        "plan, experts": lambda console: show_result(console, experts, all_reasons=True),
        "plan, nothing fits": lambda console: show_result(console, nothing),
        "explain": lambda console: explain.show_plan(console, best),
        "explain, experts": lambda console: explain.show_plan(console, experts.plans[0]),
        "cheat-sheet": lambda console: explain.show_cheatsheet(console, best),
        "what-if": lambda console: explain.show_what_if(console, best, changes),
        "largest": lambda console: explain.show_largest(console, best, largest(best, "mbs")),
        "presets": lambda console: presets.show_presets(console, None),
        "a preset": lambda console: presets.show_presets(console, "h100"),
        "a model": lambda console: presets.show_presets(console, "qwen3-next-80b-a3b"),
        "a row": lambda console: accuracy.show_row(console, rows[0]),
        "accuracy": lambda console: accuracy.show(console, rows, rows, "source", 5),
        **measured_outputs(),
    }


def measured_outputs() -> dict[str, Callable[[Console], object]]:
    """The widest figures of verbs that measure: hundreds of milliseconds, ranks of three digits, sizes of GiB."""
    step = StepTime("step 5", *(0.1234,) * 6)
    techniques = (TechniqueTime("context", 3072.0, {"reduce_scatter": 1024.0, "all_gather": 2048.0}, 0.4567, 0.1234),)
    rank = RankTime("rank127.json.gz", 127, "gpu", 9, None, (step,) * 5, techniques, (), None, None, None)
    terms = tuple(ComparedTerm(name, "s", 0.1234, 0.2345, part=True) for name in ("tensor communication", "gradient reduction"))
    timings = tuple(CollectiveTiming("reduce_scatter", 128, 2**size, 0.1234, 0.1111, 0.2345) for size in (20, 30))
    figures = Figures(0.1234, 123.4, 0.1234, 0.1234)
    rung = Rung(
        "gradients reduced in buckets", "all-reduce of 25 MiB", "dp128 zero0 mbs1·gas16", figures, figures, 123456.0, 0.4
    )
    return {
        "profile": lambda console: profile.show(console, Analysis((rank,) * 3, None, terms, ("A step takes 0.1 s",), ())),
        "compare": lambda console: compare.show_terms(console, "one step", ("planned", "measured"), terms),
        "bench collectives": lambda console: bench.show_collectives(console, CollectivesReport("128 GPUs over NCCL", timings)),
        "bench ladders": lambda console: bench.show_ladder(console, Ladder("data", "data parallelism", (rung, rung))),
    }


def accuracy_rows() -> list[ScoredRun]:
    runs, _ = read(PUBLISHED)
    return score(runs[:12])


@pytest.mark.quick_cases("80", "120")
@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_no_table_splits_a_word_or_is_wider_than_the_terminal(
    outputs: dict[str, Callable[[Console], object]], width: int
) -> None:
    for name, output in outputs.items():
        console = RecordingConsole(width)
        output(console)
        text = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())  # type: ignore[attr-defined]
        assert max(map(len, text.splitlines())) <= width, name
        for grid, printed in console.tables:
            lost = [word for word in words_of(grid) if word not in printed]
            assert not lost, (name, width, grid.title, lost)


def test_tables_in_a_pipe_have_no_lines() -> None:
    console = PlainConsole(width=100)
    console.file = io.StringIO()
    grid = lines.table("A title", "name", "GiB")
    grid.add_row("h100", "79.1")
    console.print(grid)
    assert console.file.getvalue().split() == ["A", "title", "name", "GiB", "h100", "79.1"]
