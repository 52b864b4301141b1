"""Words of users on a terminal: control characters are shown as pictures, and no markup is read from them."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from rich.table import Table

from ultrascale.show.lines import PlainConsole, bullets, labelled
from ultrascale.specs.folders import folder_name
from ultrascale.specs.printable import printable

Run = Callable[..., tuple[int, str, str]]

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
