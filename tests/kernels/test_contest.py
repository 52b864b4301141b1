"""`bench kernels`: contestants compute the same thing, and what a table and its JSON say of times."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.nn.attention import flex_attention

from ultrascale.cli.bench import kernel_contest
from ultrascale.cli.common import plain
from ultrascale.specs.errors import SpecError
from ultrascale.specs.model import Model

kernels = kernel_contest()  # which adds its folder to sys.path
cases = importlib.import_module("kernel_contest.cases")
KernelCandidate, KernelComparison, KernelResult = kernels.KernelCandidate, kernels.KernelComparison, kernels.KernelResult

SMALL = kernels.KernelShape(
    Model(name="small", layers=1, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=16, vocab=96, rope_theta=1e4), mbs=2, seq=24
)
CPU = torch.device("cpu")


def worst(comparison: Any, names: tuple[str, ...]) -> dict[str, float]:
    """The difference of each from the plain operators."""
    wanted, found = None, {}
    for name in names:
        one = comparison.candidates[name]()
        outputs = one.run()
        outputs = outputs if one.result is None else one.result()
        wanted = wanted or tuple(output.clone() for output in outputs)
        found[name] = kernels.difference(outputs, wanted)
        assert all(bool(output.any()) for output in outputs)
    return found


@pytest.mark.parametrize("kernel", ["norm", "rotary", "gate", "loss", "window", "documents"])
def test_ours_computes_what_plain_operators_do(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU ours are the plain twins, and FlexAttention runs uncompiled."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr("kernel_contest.cases.DOCUMENT", 6)
    comparison = cases.CASES[kernel](SMALL, CPU, torch.float32)
    assert worst(comparison, ("eager", "ours"))["ours"] < 1e-5
    assert comparison.moved > 0 or comparison.flops > 0


def test_a_run_that_overwrites_its_inputs_is_put_back() -> None:
    comparison = cases.CASES["rotary"](SMALL, CPU, torch.float32)
    ours = comparison.candidates["ours"]()
    first = [output.clone() for output in ours.run()]
    turned_twice = ours.run()
    assert not torch.allclose(turned_twice[0], first[0])
    ours.reset()
    torch.testing.assert_close(ours.run(), tuple(first))


def test_the_formula_of_adamw_is_torchs() -> None:
    comparison = cases.adamw(SMALL, CPU, torch.bfloat16)
    torchs = comparison.candidates["eager"]()
    torchs.run()
    assert torchs.result is not None
    for number, update in enumerate(torchs.result()):
        assert update.abs().max() > 1e-4, number
    masters, grads = [torch.full((3,), 0.5)], [torch.tensor([1.0, -2.0, 0.0], dtype=torch.bfloat16)]
    mean, square, copy = [torch.zeros(3)], [torch.zeros(3)], [torch.zeros(3, dtype=torch.bfloat16)]
    cases.plain_steps(masters, grads, mean, square, copy)
    # By hand: decay takes 1e-4 of 0.5, and the first update is the gradient's sign.
    assert masters[0].tolist() == pytest.approx([0.49895, 0.50095, 0.49995], abs=1e-7)
    assert torch.equal(copy[0], masters[0].bfloat16())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
def test_the_kernels_under_tritons_interpreter() -> None:
    """In a process of its own: whether Triton interprets is decided when it is first imported."""
    file = Path(__file__).with_name("test_contest_interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("....")  # ours; Liger's come last, and may not be there


def row(ours: float = 0.5, **others: float) -> Any:
    times = {**(others or {"eager": 2.0, "compile": 0.8}), "ours": ours}
    differences = {"eager": 0.0, "ours": 3e-3}
    return KernelResult(
        "norm", "1b", "32,768 × 2,048", times, {"liger": "not installed"}, differences, {"ours": 0.25}, 3600.0, None, 0.75
    )


def test_our_kernel_wins_where_it_is_faster_than_the_best_other() -> None:
    assert row().share == pytest.approx(0.5 / 0.8)
    assert row().verdict == "keep"
    assert row(eager=2.0, liger=0.4).verdict == "slower"
    assert row(eager=0.5).verdict == "slower"  # no faster is no reason
    alone = KernelResult("norm", "1b", "", {"ours": 1.0}, {"eager": "out of memory"}, {}, {}, None, None, None)
    assert alone.share is None
    assert alone.verdict == "–"


def test_the_table_shows_times_shares_rates_and_verdicts() -> None:
    report = kernels.KernelsReport(
        "NVIDIA X, torch 9", (row(), row(ours=0.9)), ("1b: attention: cuDNN 4.90 ms, flash 7.50 ms",)
    )
    text = StringIO()
    kernels.show_kernels(Console(file=text, width=220), report)
    for word in ("0.500", "0.800", "not installed", "0.62", "3,600 GB/s (75 % of the GPU's)", "ours 3.0e-03", "keep", "slower"):
        assert word in text.getvalue(), word
    assert "cuDNN 4.90 ms" in text.getvalue()
    assert "slower: norm (1b)" in text.getvalue()
    data = json.loads(json.dumps(kernels.kernels_json(report), allow_nan=False, default=plain))
    assert [one["verdict"] for one in data["kernels"]] == ["keep", "slower"]
    assert data["kernels"][0]["times_ms"]["compile"] == 0.8
    assert data["kernels"][0]["missing"] == {"liger": "not installed"}


def test_out_of_memory_and_failures_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> tuple[torch.Tensor, ...]:
        raise torch.OutOfMemoryError

    def broken() -> object:
        raise TypeError("another version")

    fine = KernelCandidate(lambda: (torch.ones(2),))
    comparison = KernelComparison(
        "2",
        {"eager": lambda: KernelCandidate(full), "compile": lambda: fine, "liger": broken, "ours": lambda: fine},
        moved=10**9,
    )
    monkeypatch.setattr(kernels, "time_ms", lambda runners, _: dict.fromkeys(runners, 2.0))
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    found = kernels._measure_one("norm", SMALL, comparison, None, lambda _: None)
    assert found.missing == {"eager": "out of memory", "liger": "failed: TypeError"}
    assert found.times_ms == {"compile": 2.0, "ours": 2.0}
    assert found.gb_s == pytest.approx(500.0)  # a gigabyte in two milliseconds
    assert found.of_peak is None  # of a GPU that is not known


def test_ours_may_not_fail_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> object:
        raise TypeError("ours")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with pytest.raises(TypeError, match="ours"):
        kernels._measure_one("norm", SMALL, KernelComparison("2", {"ours": broken}), None, lambda _: None)


def test_shapes_are_those_of_two_models_or_of_one_width() -> None:
    one, three = kernels.shapes(None, None)
    assert (one.mbs, one.seq, one.model.hidden, one.model.head_dim) == (8, 4096, 2048, 64)
    assert (three.tokens, three.model.hidden, three.model.heads, three.model.kv_heads) == (16384, 3072, 24, 8)
    (wide,) = kernels.shapes(1000, 5120)
    assert (wide.mbs, wide.seq, wide.model.ffn, wide.model.heads, wide.model.kv_heads) == (1, 1000, 20480, 40, 8)
    assert kernels.shapes(8192, 256)[0].model.kv_heads == 1


@pytest.mark.parametrize(
    ("tokens", "hidden", "words"), [(None, 100, "multiple of 128"), (None, 0, "such as 4096"), (0, None, "--tokens is 0")]
)
def test_invalid_shapes_are_refused(tokens: int | None, hidden: int | None, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        kernels.shapes(tokens, hidden)


def test_every_kernel_has_its_case() -> None:
    assert list(kernels.KERNELS) == list(cases.CASES)
