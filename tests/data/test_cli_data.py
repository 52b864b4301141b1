"""The verbs of `ultrascale data`: what they print, for people and for machines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from text_builders import json_lines, words
from typer.testing import CliRunner

from ultrascale.cli.data import app, progress_line
from ultrascale.data.tokenize import TokenizeProgress
from ultrascale.specs.errors import SpecError


def called(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_tokenize_then_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    json_lines(tmp_path / "a.jsonl", ["one", "three"], field="body")
    output = called("tokenize", "a.jsonl", "-o", "out", "--field", "body", "--workers", 1)
    assert "out: 10 tokens (uint16) in 2 documents, vocabulary 256 (bytes). Train on it with train.data=out" in output
    rows = dict(line.split("  ", 1) for line in called("info", "out").splitlines())
    assert rows["tokens"].strip() == "10 (uint16)"
    assert rows["longest document"].strip() == "6 tokens"
    assert rows["mean document"].strip() == "5.0 tokens"
    assert rows["made from"].strip().startswith("a.jsonl: 1 files, ")


def test_json_for_machines(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "a.jsonl", words(5))
    tokenized = json.loads(called("tokenize", source, "-o", tmp_path / "out", "--json"))
    assert (tokenized["documents"], tokenized["vocab"], tokenized["eod"]) == (5, 256, 0)
    info = json.loads(called("info", tmp_path / "out", "--json"))
    assert (info["tokens"], info["facts"]["tokens"]) == (tokenized["tokens"], tokenized["tokens"])
    np.array([1, 7, 3], dtype=np.uint16).tofile(tmp_path / "flat.bin")
    flat = json.loads(called("info", tmp_path / "flat.bin", "--json"))
    assert (flat["kind"], flat["vocab"], flat["largest_seen"], flat["facts"]) == ("flat", None, 7, None)
    assert "not stated; tokens up to 7 found" in called("info", tmp_path / "flat.bin")


def test_errors_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="does not exist"):
        called("info", tmp_path / "none")


def test_progress_line() -> None:
    progress = TokenizeProgress(
        documents=1200, tokens=3_000_000, bytes=30_000_000, total_bytes=120_000_000, bytes_before=10_000_000,
        tokens_before=1_000_000, seconds=4.0,
    )  # fmt: skip
    # 20 MB in 4 s are 5 MB/s, which leaves 18 s for 90 MB.
    assert progress_line(progress) == " 25.0%  1,200 documents, 5.0 MB/s, 500,000 tokens/s, 0:00:18 left"


def test_data_commands_import_nothing_heavy() -> None:
    code = "import ultrascale.cli.data, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "torch", "tokenizers", "pyarrow", "yaml"} & set(loaded)


def test_tokenizing_never_imports_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom ultrascale.data.tokenize import tokenize\nfrom ultrascale.data.corpora import check\n"
        "from ultrascale.specs.training import Training\n"
        "tokenize(sys.argv[1], sys.argv[2])\ncheck(Training(data=sys.argv[2]), 256, 8)\nprint(*sys.modules)"
    )
    source = json_lines(tmp_path / "a.jsonl", words(5))
    done = subprocess.run([sys.executable, "-c", code, source, tmp_path / "out"], capture_output=True, text=True, check=True)
    assert not {"torch", "tokenizers", "pyarrow"} & set(done.stdout.split())
