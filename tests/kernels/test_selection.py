"""Which of the engine's own kernels run where, and the reason where blocks stay plain."""

from __future__ import annotations

from typing import Any

import pytest

from parallel.harness import job_of, training_of
from ultrascale.kernels.selection import Kernels, choose, why_not_chunked, why_not_fused
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

ALL = Kernels(fused=True, compiled=True, loss=True, adamw=True, single_microbatch=True, cuda_graphs=True)


def test_one_gpu_runs_all_of_them_and_a_cpu_none() -> None:
    job, training = job_of("llama"), training_of()
    assert choose(job, Layout(mbs=2), training, "cuda") == ALL
    assert choose(job, Layout(mbs=2), training, "cpu") == Kernels()
    assert choose(job, Layout(mbs=2), training_of(kernels="eager"), "cuda") == Kernels()
    assert choose(job, Layout(mbs=2), training_of(kernels="compile"), "cuda") == Kernels(compiled=True)


@pytest.mark.parametrize(
    ("fields", "off"),
    [
        ({"gas": 2}, "single_microbatch"),
        ({"dp": 2}, "single_microbatch"),
        ({"tp": 2}, "compiled single_microbatch"),
        ({"tp": 2, "sequence_parallel": False}, "compiled single_microbatch"),
        ({"tp": 2, "recompute": "full"}, "compiled single_microbatch"),
        ({"cp": 2}, "compiled single_microbatch"),
        ({"cp": 2, "tp": 2, "recompute": "selective"}, "compiled single_microbatch"),
        ({"pp": 2, "gas": 2}, "single_microbatch cuda_graphs"),
        ({"pp": 2, "gas": 2, "schedule": "zero-bubble"}, "compiled single_microbatch cuda_graphs"),
        ({"pp": 2, "gas": 2, "schedule": "zero-bubble", "recompute": "full"}, "compiled single_microbatch cuda_graphs"),
        ({"recompute": "full"}, ""),
        ({"recompute": "selective"}, ""),
        ({"offload": "optimizer"}, "adamw single_microbatch cuda_graphs"),
    ],
    ids=str,
)
def test_a_layout_decides(fields: dict[str, Any], off: str) -> None:
    found = choose(job_of("llama"), Layout(**fields), training_of(), "cuda")
    assert {name for name, used in vars(found).items() if not used} == {"delta_rule", *off.split()}


def test_linear_attention_has_kernels_in_bf16_and_is_compiled_with_them() -> None:
    model = Model.load("qwen3-next-80b-a3b")
    narrow = model.linear_attention.model_copy(update={"key_head_dim": 32}) if model.linear_attention else None
    job = Job(model=model, cluster=Cluster.load("1xh200"), seq=4096, batch_tokens=4096)

    def found(job: Job, layout: Layout, device: str = "cuda", **settings: Any) -> tuple[bool, bool]:
        kernels = choose(job, layout, training_of(**settings), device)
        return kernels.delta_rule, kernels.compiled

    assert found(job, Layout()) == (True, True)
    assert found(job, Layout(tp=2)) == (True, False)
    # The plain rule is a loop, which a compiler would unroll.
    assert found(job, Layout(), kernels="compile") == (False, False)
    assert found(job.changed(precision="fp32"), Layout()) == (False, False)
    assert found(job.changed(model=model.model_copy(update={"linear_attention": narrow})), Layout()) == (False, False)
    assert found(job, Layout(), device="cpu") == (False, False)


@pytest.mark.parametrize(
    ("precision", "tp", "keep", "chunked"),
    [
        ("fp16", 1, "ends", False),
        ("fp16", 2, "ends", False),
        ("fp8", 1, "none", True),
        ("fp8", 2, "none", True),
        ("fp8", 2, "head", True),
    ],
)
def test_only_fp16_has_its_loss_whole(precision: str, tp: int, keep: str, chunked: bool) -> None:
    assert choose(job_of("llama", precision=precision), Layout(tp=tp), training_of(fp8_keep=keep), "cuda").loss == chunked


@pytest.mark.parametrize(
    ("family", "fields", "word"),
    [
        ("gpt2", {}, "RMSNorm, SwiGLU"),
        ("deepseek", {}, "experts"),
        ("llama", {"qk_norm": True}, "norms of queries"),
        ("llama", {"sliding_window": 4}, "window of 4"),
        ("llama", {"head_dim": 24}, "heads of 24"),
    ],
)
def test_unfused_blocks_are_reported(family: str, fields: dict[str, Any], word: str) -> None:
    job = job_of(family)
    job = job.model_copy(update={"model": job.model.model_copy(update=fields)})
    assert word in (why_not_fused(job, Layout(), training_of()) or "")


def test_a_document_mask_excludes_cuda_graphs_alone() -> None:
    found = choose(job_of("llama"), Layout(), training_of(document_mask=True), "cuda")
    assert {name for name, used in vars(found).items() if not used} == {"cuda_graphs", "delta_rule"}


@pytest.mark.parametrize(
    "fields",
    [
        {"tp": 2},
        {"cp": 2},
        {"recompute": "full"},
        {"pp": 2, "gas": 4, "schedule": "zero-bubble"},
        {"pp": 2, "gas": 4, "schedule": "zb-v", "virtual_stages": 2, "tp": 2, "recompute": "full"},
    ],
    ids=str,
)
def test_fp8_is_fused_under_every_cut(fields: dict[str, Any]) -> None:
    model = job_of("llama").model.model_copy(update={"hidden": 64, "kv_heads": 4, "ffn": 96})
    job = job_of(model, precision="fp8")
    assert why_not_fused(job, Layout(**fields), training_of()) is None
    whole = why_not_chunked(job, Layout(**fields), training_of(tp_chunks=2), "cuda")
    assert whole == ("matmuls in fp8 take whole operands" if "tp" in fields else "layers are not cut (tp = 1)")


def test_options_are_reported() -> None:
    assert "eager" in (why_not_fused(job_of("llama"), Layout(), training_of(kernels="eager")) or "")
