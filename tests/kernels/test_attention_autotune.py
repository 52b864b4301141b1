"""Attention's kernel is selected by time: fastest first, failing ones dropped, never on a CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch.nn.attention import SDPBackend

from parallel.harness import job_of, training_of
from ultrascale.data.corpora import corpus
from ultrascale.kernels import autotune, flash, optional_kernels, timing_cache
from ultrascale.launch import rank
from ultrascale.model.attention import TileAttention
from ultrascale.model.self_attention import CausalAttention
from ultrascale.model.transformer import Transformer
from ultrascale.parallel.mesh import Mesh
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.train.build import build_engine
from ultrascale.train.data import Batches
from ultrascale.train.engine import Engine

CUDNN, FLASH, EFFICIENT = autotune.BACKENDS
ORDER = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def timed_shapes(monkeypatch: pytest.MonkeyPatch) -> list[autotune.AttentionShape]:
    """Fake times: cuDNN is slower than flash, the third fails. Returns the timed shapes."""
    shapes: list[autotune.AttentionShape] = []

    def time_ms(name: str, shape: autotune.AttentionShape, _: torch.device) -> float:
        shapes.append(shape)
        if name == EFFICIENT:
            raise RuntimeError("No available kernel")
        return {CUDNN: 7.5, FLASH: 4.9, autotune.FLASH_4: 4.4}[name]

    monkeypatch.setattr(autotune, "_attention_ms", time_ms)
    return shapes


def test_kernels_are_sorted_by_time_and_failing_ones_dropped(timed_shapes: list[autotune.AttentionShape]) -> None:
    found = autotune.fastest_attention(job_of("llama"), Layout(mbs=3, tp=2), torch.float32, GPU)
    assert found is not None
    assert str(found) == "attention: flash 4.90 ms, cuDNN 7.50 ms"
    model = job_of("llama").model
    assert timed_shapes[0] == (3, job_of("llama").seq, model.heads // 2, model.kv_heads // 2, model.head_dim, torch.float32)
    plain = Transformer(model)
    found.apply([plain])
    cores = [module for module in plain.modules() if isinstance(module, CausalAttention)]
    assert len(cores) == model.layers
    assert all(core.backends == [*ORDER, SDPBackend.MATH] and core.kernel is None for core in cores)


def test_a_shape_is_timed_once_on_a_machine(
    timed_shapes: list[autotune.AttentionShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, other = (autotune.AttentionShape(2, length, 8, 2, 64, torch.bfloat16) for length in (128, 256))
    first = autotune.time_attention(shape, GPU)
    timed = len(timed_shapes)
    again = autotune.time_attention(shape, GPU)
    assert len(timed_shapes) == timed
    assert str(again) == f"{first} (timed by an earlier run)"
    assert timing_cache.load() == {
        timing_cache.environment("cuda"): {
            "attention of 2 × 128 tokens, 8 and 2 heads of 64, bfloat16": {CUDNN: 7.5, FLASH: 4.9}
        }
    }
    autotune.time_attention(other, GPU)
    monkeypatch.setattr(autotune, "_gpu", lambda _: "another GPU")
    autotune.time_attention(shape, GPU)
    assert len(timed_shapes) == 3 * timed


@pytest.mark.usefixtures("timed_shapes")
@pytest.mark.parametrize("content", ["", "[1, 2", '{"a": 3}', '{"a": {"b": {"c": "d"}}}', "null", "[" * 100_000])
def test_a_broken_file_of_timings_is_as_good_as_none(content: str) -> None:
    timing_cache.file().parent.mkdir(parents=True)
    timing_cache.file().write_text(content)
    shape = autotune.AttentionShape(2, 128, 8, 2, 64, torch.bfloat16)
    assert "earlier" not in str(autotune.time_attention(shape, GPU))
    assert "earlier" in str(autotune.time_attention(shape, GPU))


def test_a_folder_that_cannot_be_written_ends_no_run(
    timed_shapes: list[autotune.AttentionShape], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert autotune.time_attention(autotune.AttentionShape(2, 128, 8, 2, 64, torch.bfloat16), GPU) is not None
    assert len(timed_shapes) == 2 * len(autotune.BACKENDS)


@pytest.mark.usefixtures("timed_shapes")
def test_flash_attention_4_is_timed_where_installed_and_dtype_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_kernels, "installed", lambda _: True)
    in_fp32, job = job_of("llama"), job_of("llama").changed(precision="bf16")
    assert autotune.FLASH_4 not in str(autotune.fastest_attention(in_fp32, Layout(), torch.float32, GPU))
    found = autotune.fastest_attention(job, Layout(), torch.bfloat16, GPU)
    assert found is not None
    assert str(found) == "attention: FlashAttention 4 4.40 ms, flash 4.90 ms, cuDNN 7.50 ms"
    core = CausalAttention()
    found.apply([core])
    assert core.kernel is flash.attend
    assert core.backends == [*ORDER, SDPBackend.MATH]
    autotune.AttentionTimes({CUDNN: 1.0, autotune.FLASH_4: 2.0}).apply([core])
    assert core.kernel is None  # it is the slower one


def test_a_run_falls_back_where_flash_attention_4_fails(
    monkeypatch: pytest.MonkeyPatch, timed_shapes: list[autotune.AttentionShape]
) -> None:
    times = autotune._attention_ms

    def fail(name: str, *rest: object) -> float:
        if name == autotune.FLASH_4:
            raise AssertionError("head_dim must be divisible by 8\nand more")
        return times(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(autotune, "_attention_ms", fail)
    monkeypatch.setattr(optional_kernels, "installed", lambda _: True)
    found = autotune.fastest_attention(job_of("llama").changed(precision="bf16"), Layout(), torch.bfloat16, GPU)
    assert str(found).endswith("; FlashAttention 4 does not run here: AssertionError: head_dim must be divisible by 8")
    assert autotune.FLASH_4 not in (found.times_ms if found else {})


@pytest.mark.usefixtures("timed_shapes")
def test_nothing_is_timed_without_alternatives() -> None:
    job = job_of("llama")
    windowed = job.model_copy(update={"model": job.model.model_copy(update={"sliding_window": 4})})
    assert autotune.fastest_attention(job, Layout(), torch.bfloat16, CPU) is None
    assert autotune.fastest_attention(windowed, Layout(), torch.bfloat16, GPU) is None


@pytest.mark.parametrize(("way", "shape"), [("zigzag", (2, 8, 2, 1)), ("ulysses", (2, 16, 1, 1))])
def test_context_parallelism_times_what_a_rank_attends_to(
    way: str, shape: tuple[int, ...], timed_shapes: list[autotune.AttentionShape]
) -> None:
    """Four query heads and two of keys over tp 2: a tile of half the sequence, or all of it with half the heads."""
    job = job_of("llama").changed(seq=16, batch_tokens=32)
    found = autotune.fastest_attention(job, Layout(tp=2, cp=2, mbs=2, context_parallel=way), torch.bfloat16, GPU)
    assert {one[:4] for one in timed_shapes} == {shape}
    assert found is not None
    tiles = TileAttention()
    found.apply([tiles])
    assert not tiles.cudnn
    autotune.AttentionTimes({autotune.FLASH_4: 0.5, CUDNN: 1.0, FLASH: 2.0}).apply([tiles])
    assert tiles.cudnn


def test_no_kernel_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(autotune, "_attention_ms", refuse)
    assert autotune.fastest_attention(job_of("llama"), Layout(), torch.bfloat16, GPU) is None


def test_a_gpu_run_reports_its_kernel_and_dense_masks() -> None:
    job = job_of("llama")
    narrow = job.model_copy(update={"model": job.model.model_copy(update={"sliding_window": 4, "head_dim": 8})})

    def notes(job: Job, device: torch.device, times: autotune.AttentionTimes | None) -> str:
        mesh, autotuned = SimpleNamespace(device=device, layout=Layout()), () if times is None else (times,)
        engine = SimpleNamespace(job=job, mesh=mesh, training=training_of(), autotuned=autotuned)
        return "; ".join(rank._notes(cast(Engine, engine)))

    assert notes(job, GPU, autotune.AttentionTimes({FLASH: 4.9})) == "attention: flash 4.90 ms"
    assert "attention's mask is dense: heads of 8" in notes(narrow, GPU, None)
    assert notes(narrow, CPU, None) == ""


def engine_of(**fields: object) -> Engine:
    job, training = job_of("llama"), training_of(**fields)
    batches = Batches(corpus(training, job.model.vocab), job.seq, 2, training.seed)
    return build_engine(job, Mesh.build(Layout(mbs=2), job.model.kv_heads), training, batches)


def test_a_cpu_engine_keeps_torchs_attention() -> None:
    engine = engine_of()
    assert engine.autotuned == ()
    modules = [module for chunk in engine.pipeline.chunks.values() for module in chunk.gradients.module.modules()]
    assert [core.backends for core in modules if isinstance(core, CausalAttention)] == [[]] * engine.job.model.layers


def test_every_layer_gets_the_selected_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "fastest_attention", lambda *_: autotune.AttentionTimes({FLASH: 1.0}))
    engine = engine_of()
    modules = [module for chunk in engine.pipeline.chunks.values() for module in chunk.gradients.module.modules()]
    cores = [module for module in modules if isinstance(module, CausalAttention)]
    assert [core.backends for core in cores] == [[SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]] * engine.job.model.layers
    assert engine_of(document_mask=True).autotuned == ()  # masks have a kernel of their own
