"""The kernel of the gated MLP is selected by time: only on a GPU, only in fused blocks; a failure never ends the run."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from parallel.harness import job_of, training_of
from ultrascale.kernels import autotune, fused, gated_gemm, optional_kernels
from ultrascale.kernels.fused import FusedBlock, GatedMLPKernel
from ultrascale.model.transformer import Transformer
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def job() -> Job:
    """Whose sizes suit the fused block."""
    small = job_of("llama")
    model = small.model.model_copy(update={"hidden": 128, "ffn": 256, "head_dim": 32})
    return small.changed(model=model, precision="bf16")


@pytest.fixture
def timed_shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Fake times: gated GEMMs are faster. Returns the timed shapes."""
    shapes: list[tuple[int, int, int]] = []

    def times_ms(kernels: dict[str, GatedMLPKernel], tokens: int, hidden: int, ffn: int, *_: object) -> dict[str, float]:
        shapes.append((tokens, hidden, ffn))
        return {name: 8.1 if isinstance(kernel, gated_gemm.GatedGemmKernel) else 9.0 for name, kernel in kernels.items()}

    monkeypatch.setattr(autotune, "_mlp_ms", times_ms)
    monkeypatch.setattr(optional_kernels, "installed", lambda _: True)
    return shapes


def blocks_of(found: autotune.MLPTimes) -> list[GatedMLPKernel]:
    model = Transformer(job().model)
    fused.apply(model)
    found.apply([model])
    return [block.mlp_kernel for block in model.each_block() if isinstance(block, FusedBlock)]


def test_every_fused_block_uses_the_faster_kernel(timed_shapes: list[tuple[int, int, int]]) -> None:
    found = autotune.fastest_mlp(job(), Layout(mbs=3), training_of(), torch.bfloat16, GPU)
    assert str(found) == "gates: within matmuls 8.10 ms, between them 9.00 ms"
    assert timed_shapes == [(3 * job().seq, 128, 256)]
    assert found is not None
    kernels = blocks_of(found)
    assert len(kernels) == job().model.layers
    assert all(isinstance(kernel, gated_gemm.GatedGemmKernel) for kernel in kernels)
    assert all(
        isinstance(kernel, gated_gemm.GatedGemmKernel) for kernel in blocks_of(autotune.MLPTimes(8.0, 8.1))
    )  # as good as equal
    assert not any(isinstance(kernel, gated_gemm.GatedGemmKernel) for kernel in blocks_of(autotune.MLPTimes(8.0, 8.2)))


@pytest.mark.usefixtures("timed_shapes")
def test_nothing_is_timed_without_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = training_of(kernels="eager")
    assert autotune.fastest_mlp(job(), Layout(), training_of(), torch.bfloat16, CPU) is None
    assert autotune.fastest_mlp(job(), Layout(tp=2), training_of(tp_chunks=2), torch.bfloat16, GPU) is None
    assert autotune.fastest_mlp(job(), Layout(), eager, torch.bfloat16, GPU) is None
    assert autotune.fastest_mlp(job().changed(precision="fp32"), Layout(), training_of(), torch.float32, GPU) is None
    assert autotune.fastest_mlp(job().changed(precision="fp8"), Layout(), training_of(), torch.bfloat16, GPU) is None
    monkeypatch.setattr(optional_kernels, "installed", lambda _: False)
    assert autotune.fastest_mlp(job(), Layout(), training_of(), torch.bfloat16, GPU) is None


def test_a_run_falls_back_where_quack_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> dict[str, float]:
        raise TypeError("no such tile\nand more")

    monkeypatch.setattr(autotune, "_mlp_ms", fail)
    monkeypatch.setattr(optional_kernels, "installed", lambda _: True)
    found = autotune.fastest_mlp(job(), Layout(), training_of(), torch.bfloat16, GPU)
    assert str(found) == "gates: between matmuls; quack's kernels do not run here: TypeError: no such tile"
    assert found is not None
    assert not any(isinstance(kernel, gated_gemm.GatedGemmKernel) for kernel in blocks_of(found))


def test_out_of_memory_in_timing_selects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(autotune, "_mlp_ms", refuse)
    monkeypatch.setattr(optional_kernels, "installed", lambda _: True)
    assert autotune.fastest_mlp(job(), Layout(), training_of(), torch.bfloat16, GPU) is None


def test_kernels_are_timed_in_turns() -> None:
    class FakeGraph:
        def __init__(self, ms: float) -> None:
            self.ms = ms

        def times_ms(self, replays: int) -> list[float]:
            turns.append((self.ms, replays))
            return [self.ms] * replays

    turns: list[tuple[float, int]] = []
    graphs = cast(dict[str, autotune.TimedGraph], {"long": FakeGraph(5.0), "short": FakeGraph(0.01)})
    assert autotune.in_turns_ms(graphs, rounds=2, turn_ms=100.0) == {"long": 5.0, "short": 0.01}
    assert turns == [(5.0, 1), (5.0, 5), (0.01, 1), (0.01, 2500)] * 2
