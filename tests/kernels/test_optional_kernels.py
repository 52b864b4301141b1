"""Optional packages that are half installed or fail: one note, and the run falls back to the plain kernel."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.test_fused import built, train_alike
from parallel.harness import job_of, training_of
from ultrascale.kernels import autotune, flash, fused, gated_gemm, optional_kernels
from ultrascale.kernels.optional_kernels import FLASH_ATTENTION_4, QUACK, OptionalPackage
from ultrascale.measure import doctor_facts as facts
from ultrascale.model.attention import causal_attention
from ultrascale.specs.layout import Layout

GPU, CPU = torch.device("cuda"), torch.device("cpu")
CTK = "No CTK flavor installed"

FORWARD = """
from ultrascale.model.attention import attend, attend_backward
def _flash_attn_fwd(q, k, v, *, causal, return_lse):
    out, sums = attend(q, k, v, True, q.shape[-1] ** -0.5)
    return out.contiguous(), sums
"""
FAILING_BACKWARD = FORWARD + "def _flash_attn_bwd(*given, **named):\n    raise AssertionError('no such tile')\n"
FLASH: dict[str, tuple[dict[str, str], str]] = {
    "import of the package": ({"flash_attn/__init__.py": f"raise RuntimeError('{CTK}')"}, f"RuntimeError: {CTK}"),
    "import of another": ({"flash_attn/cute/interface.py": "import cutlass_of_nobody"}, "ModuleNotFoundError: No module named"),
    "import of a library": ({"flash_attn/cute/__init__.py": "raise OSError('libcuda.so.1: no such file')"}, "OSError: libcuda"),
    "attribute": ({"flash_attn/cute/interface.py": "x = 1"}, "AttributeError: module 'flash_attn.cute.interface'"),
    "attribute that is computed": (
        {"flash_attn/cute/interface.py": f"def __getattr__(name):\n    raise RuntimeError('{CTK}')"},
        f"RuntimeError: {CTK}",
    ),
    "forward": (
        {"flash_attn/cute/interface.py": "def _flash_attn_fwd(*given, **named):\n    raise ValueError('line one\\nline two')"},
        "ValueError: line one",
    ),
    "backward": ({"flash_attn/cute/interface.py": FAILING_BACKWARD}, "AssertionError: no such tile"),
}
GATED = """
import torch, torch.nn.functional as F
def gemm_gated(x, weight, *, activation, concat_layout, config, tuned):
    opened, up = (x @ weight).chunk(2, dim=-1)
    return torch.stack((opened, up), dim=-1).flatten(-2), F.silu(opened) * up
"""
KEY = "no fail-closed semantic key"
QUACKS: dict[str, tuple[dict[str, str], str]] = {
    "import of the package": ({"quack/__init__.py": f"raise RuntimeError('{CTK}')"}, f"RuntimeError: {CTK}"),
    "attribute": ({"quack/gemm_interface.py": "x = 1"}, "ImportError: cannot import name 'gemm_gated'"),
    "configuration": ({"quack/gemm_interface.py": GATED, "quack/gemm_config.py": "x = 1"}, "ImportError: cannot import name"),
    "forward": (
        {"quack/gemm_interface.py": f"def gemm_gated(*given, **named):\n    raise RuntimeError('{KEY}')"},
        f"RuntimeError: {KEY}",
    ),
    "backward": (
        {"quack/gemm_interface.py": GATED + f"def gemm_dgated(*given, **named):\n    raise KeyError('{KEY}')"},
        f'KeyError: "{KEY}"'.replace('"', "'"),
    ),
}
WHOLE = {
    "flash_attn/__init__.py": "",
    "flash_attn/cute/__init__.py": "",
    "flash_attn/cute/interface.py": "",
    "quack/__init__.py": "",
    "quack/gemm_interface.py": "",
    "quack/gemm_config.py": "def GemmConfig(**fields):\n    return fields",
}


def forget() -> None:
    """All that is known of the packages."""
    optional_kernels.installed.cache_clear()
    flash._package.cache_clear()
    importlib.invalidate_caches()
    for package in optional_kernels.PACKAGES:
        package.failure = ""
    for name in [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "quack")]:
        del sys.modules[name]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, str]], None]]:
    """Both packages where Python finds them, with these files in place of empty ones."""

    def write(files: dict[str, str]) -> None:
        for name, text in {**WHOLE, **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        forget()

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    yield write
    forget()


def notes(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("note:")]


def attended(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 24, heads, 16, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    out = attention(*inputs)
    return [out, *torch.autograd.grad(out, inputs, torch.randn(out.shape, generator=generator))]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", FLASH)
def test_attention_falls_back_to_torch_with_one_note(
    case: str, compiled: bool, install: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    files, reason = FLASH[case]
    install(files)
    assert FLASH_ATTENTION_4.why_not(torch.bfloat16) is None
    assert "flash_attn" not in sys.modules  # found without running any of its code
    attention = torch.compile(flash.attend, fullgraph=True, backend="aot_eager") if compiled else flash.attend
    wanted = attended(lambda q, k, v: causal_attention(q, k, v, 16**-0.5))
    for _ in range(2):
        for found, other in zip(attended(attention), wanted, strict=True):
            torch.testing.assert_close(found, other)
    (note,) = notes(capfd)
    assert note.startswith(f"note: flash-attn-4 failed ({reason}")
    assert note.endswith("the run goes on with torch's attention")


@pytest.mark.parametrize("case", QUACKS)
def test_gates_fall_back_to_plain_operators_with_one_note(case: str, install: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Losses and every gradient of blocks whose gates quack should have computed."""
    files, reason = QUACKS[case]
    install(files)
    assert QUACK.why_not(torch.bfloat16) is None
    assert "quack" not in sys.modules
    plain, ours = built(), built()
    fused.apply(ours)
    for block in ours.each_block():
        assert isinstance(block, fused.FusedBlock)
        block.mlp_kernel = gated_gemm.GatedGemmKernel()
    train_alike(plain, ours)
    (note,) = notes(capfd)
    assert note.startswith(f"note: quack-kernels failed ({reason}")


class RunOnce:
    """Replaces the timing by CUDA graphs, which needs a GPU."""

    def __init__(self, action: Callable[[], object], device: torch.device) -> None:
        action()

    def times_ms(self, replays: int = 1) -> list[float]:
        return [1.0] * replays


@pytest.mark.parametrize("case", FLASH)
def test_attention_autotune_reports_the_failure(
    case: str, install: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    install(FLASH[case][0])
    monkeypatch.setattr(autotune, "TimedGraph", RunOnce)
    found = autotune.time_attention(autotune.AttentionShape(1, 16, 2, 2, 16, torch.bfloat16), CPU)
    assert found is not None
    assert list(found.times_ms) == ["flash"]
    assert f"; FlashAttention 4 does not run here: {FLASH[case][1]}" in str(found)
    assert notes(capfd) == []  # the run prints the line above
    assert not FLASH_ATTENTION_4.failure


@pytest.mark.parametrize("case", QUACKS)
def test_gate_autotune_reports_the_failure(
    case: str, install: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    install(QUACKS[case][0])
    times = autotune._mlp_ms
    monkeypatch.setattr(autotune, "TimedGraph", RunOnce)
    monkeypatch.setattr(autotune, "in_turns_ms", lambda pieces, *_: dict.fromkeys(pieces, 1.0))
    monkeypatch.setattr(autotune, "_mlp_ms", lambda *given: times(*given[:-1], CPU))
    small = job_of("llama")
    job = small.changed(model=small.model.model_copy(update={"hidden": 128, "ffn": 256, "head_dim": 32}), precision="bf16")
    found = autotune.fastest_mlp(job, Layout(), training_of(), torch.bfloat16, GPU)
    assert str(found).startswith(f"gates: between matmuls; quack's kernels do not run here: {QUACKS[case][1]}")
    assert notes(capfd) == []
    assert not QUACK.failure


def test_out_of_memory_does_not_disable_a_package() -> None:
    def fail(error: BaseException) -> None:
        raise error

    for error in (torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()):
        package = OptionalPackage("p", "p", "plain")
        with pytest.raises(type(error)):
            package.call(partial(fail, error), lambda: None)
        assert not package.failure


def test_only_rank_0_prints_the_note(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank, printed in ((0, 1), (3, 0)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        package = OptionalPackage("p", "p", "plain")
        assert package.call(lambda: 1 // 0, lambda: 5) == 5
        assert len(notes(capfd)) == printed


def test_what_is_installed(install: Any, tmp_path: Path) -> None:
    install({})
    assert optional_kernels.installed("flash_attn.cute.interface")
    assert not optional_kernels.installed("flash_attn.cute.interface.more")
    assert not optional_kernels.installed("flash_attn.cut")
    assert not optional_kernels.installed("package_of_nobody.cute")
    # flash-attn 2 is `flash_attn`, too, and has no `cute`.
    (tmp_path / "flash_attn" / "cute" / "interface.py").unlink()
    (tmp_path / "flash_attn" / "cute" / "__init__.py").unlink()
    (tmp_path / "flash_attn" / "cute").rmdir()
    forget()
    assert not optional_kernels.installed("flash_attn.cute.interface")


def test_the_doctor_tries_to_import_them(install: Any) -> None:
    install({"quack/gemm_interface.py": f"raise RuntimeError('{CTK}')"})
    assert facts.try_import("flash_attn.cute.interface") == ""
    assert facts.try_import("quack.gemm_interface") == f"RuntimeError: {CTK}"
    install({"quack/gemm_interface.py": "import os; os._exit(3)"})
    assert facts.try_import("quack.gemm_interface") == "Python ended with 3"
    install({"quack/gemm_interface.py": "import time; time.sleep(60)"})
    assert facts.try_import("quack.gemm_interface", within_s=1.0) == "it was not imported in 1 s"
