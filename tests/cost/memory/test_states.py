"""Parameters of a rank under tp, pp and ep, and what ZeRO-3 gathers in fp8: which weights and how many bytes they save."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builders import make_job
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.estimate import estimate
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.memory.states import RankParameters, fp8_on_rank, on_rank
from ultrascale.cost.stages import share_of
from ultrascale.cost.traffic import of_stage
from ultrascale.specs import weights
from ultrascale.specs.blocks import MoE
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

MODEL = Model(name="small", layers=4, hidden=64, heads=4, kv_heads=2, ffn=192, vocab=256)
QKV_OUT, MLP = 64 * (64 + 2 * 32) + 64 * 64, 3 * 64 * 192  # head_dim 16


def job_of(model: Model = MODEL, engine: str = "ultrascale-eager", precision: str = "fp8", gpus: int = 4) -> Job:
    return make_job(model, f"{gpus}xh100", 64, gpus, engine, precision=precision)


def narrow(job: Job, stage: int = 0, **fields: Any) -> tuple[float, float]:
    columns = LayoutColumns.of([Layout(**{"dp": 4, "zero": 3, **fields})])
    found = fp8_on_rank(job, columns, share_of(job, columns, np.asarray([stage])))
    return float(found.elements[0]), float(found.scales[0])


def ranks_of(model: Model, layout: Layout) -> RankParameters:
    """One row per pipeline rank."""
    columns = LayoutColumns.of([layout] * layout.pp)
    job = make_job(model, "8xh100", 1024, 1024)
    return on_rank(model, columns, share_of(job, columns, np.arange(layout.pp)))


def test_first_and_last_block_are_gathered_in_bf16() -> None:
    assert narrow(job_of()) == (2 * (QKV_OUT + MLP), 2 * 7)
    assert narrow(job_of(), dp=2, pp=2) == (QKV_OUT + MLP, 7)  # two layers a stage, of which each has an end
    assert narrow(job_of(MODEL.model_copy(update={"layers": 6})), stage=1, dp=2, pp=3, gas=3) == (2 * (QKV_OUT + MLP), 14)
    assert narrow(job_of(MODEL.model_copy(update={"layers": 1}))) == (0, 0)


def test_a_fused_block_has_fewer_scales() -> None:
    assert narrow(job_of(engine="ultrascale")) == (2 * (QKV_OUT + MLP), 2 * 4)


def test_sizes_unsupported_by_fp8_are_gathered_in_bf16() -> None:
    assert narrow(job_of(MODEL.model_copy(update={"ffn": 200}))) == (2 * QKV_OUT, 2 * 4)
    assert narrow(job_of(), dp=1, tp=4)[0] == 0  # one shard
    # k and v are 8 wide on each of four ranks, so that q, which is multiplied with them, stays too.
    odd = MODEL.model_copy(update={"kv_heads": 4, "head_dim": 8})
    assert narrow(job_of(odd, gpus=8), dp=2, tp=4) == (2 * MLP / 4, 2 * 3)


def test_routed_experts_are_gathered_in_bf16_and_shared_ones_in_fp8() -> None:
    moe = MoE(experts=8, top_k=2, expert_ffn=96, dense_layers=1, shared_experts=1, shared_expert_ffn=32)
    shared = MODEL.model_copy(update={"moe": moe})
    assert narrow(job_of(shared)) == (2 * (QKV_OUT + 3 * 64 * 32), 2 * 7)
    alone = MODEL.model_copy(update={"ffn": 0, "moe": MoE(experts=8, top_k=2, expert_ffn=96)})
    assert narrow(job_of(alone)) == (2 * QKV_OUT, 2 * 4)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"precision": "bf16"}, {}),
        ({"engine": "torchtitan"}, {}),
        ({}, {"zero": 2}),
        ({}, {"offload": "parameters"}),
    ],
)
def test_jobs_without_fp8_gather(changes: dict[str, Any], fields: dict[str, Any]) -> None:
    assert narrow(job_of(**changes), **fields) == (0, 0)


def test_gathered_and_stored_bytes() -> None:
    """Against the same engine with wide gathers: one byte less for each such element, gathered twice."""
    job, layout = job_of(), Layout(dp=4, zero=3)
    wide = job.changed(framework=job.framework.model_copy(update={"fp8_gather": False}))
    less = [sum(one.bytes for one in of_stage(each, layout, ClusterRates(each), 0)) for each in (wide, job)]
    elements, scales = narrow(job)
    # A rank of four sends three quarters of a gather, and of an all-reduce twice that.
    assert less[0] - less[1] == 2 * elements * 3 / 4 - 4 * scales * 2 * 3 / 4
    kept = layout.changed(keep_gathered=True)
    parameter_bytes = [estimate(each, kept).memory[0].memory.parameters for each in (wide, job)]
    assert parameter_bytes[0] - parameter_bytes[1] == elements


@pytest.mark.parametrize(
    ("engine", "narrow_layers"),
    # Eager operators are fullest when the gradients of embedding and head are scattered: no layer is gathered then. A GPU's
    # kernels are at the loss, beside the last layer alone, which stays wide.
    [("playbook", 1), ("ultrascale", 0), ("ultrascale-eager", 0)],
)
def test_fp8_gather_adds_neither_time_nor_memory(engine: str, narrow_layers: int) -> None:
    job, layout = job_of(Model.load("llama-3-8b"), engine, gpus=8), Layout(dp=8, zero=3)
    wide = job.changed(framework=job.framework.model_copy(update={"fp8_gather": False}))
    one, other = estimate(job, layout), estimate(wide, layout)
    assert one.time.zero_s < other.time.zero_s
    layer = 4096 * (4096 * 2 + 2 * 1024) + 3 * 4096 * 14336
    # At the peak one bf16 layer, at an end, and one fp8 layer are gathered.
    assert other.memory[0].memory.total - one.memory[0].memory.total == pytest.approx(narrow_layers * layer, rel=0.05)


@pytest.mark.parametrize("name", sorted(Model.presets()))
def test_one_rank_holds_the_whole_model(name: str) -> None:
    model = Model.load(name)
    assert ranks_of(model, Layout()).total[0] == model.parameters


def test_tp_replicates_only_norms_of_a_dense_model() -> None:
    """Llama-3-8B at tp=8: 65 norms of 4096 on every rank, all else cut (8 kv heads: one each)."""
    model = Model.load("llama-3-8b")
    norms = 65 * 4096
    assert ranks_of(model, Layout(tp=8)).total[0] == (8_030_261_248 - norms) / 8 + norms


def test_tp_replicates_kv_heads_beyond_their_number() -> None:
    """Llama-3-8B at tp=16: 8 kv heads for 16 ranks, so the 2·4096·1024 elements of k and v are cut by 8, not 16."""
    model = Model.load("llama-3-8b")
    norms, kv = 65 * 4096, 32 * 2 * 4096 * 1024
    assert ranks_of(model, Layout(tp=16)).total[0] == (8_030_261_248 - norms - kv) / 16 + kv / 8 + norms


def test_a_pipeline_stores_a_tied_head_twice() -> None:
    """Llama-3.2-1B: the last stage has its own copy of 128256·2048 elements; the final norm sits with it."""
    model = Model.load("llama-3.2-1b")
    parameters = ranks_of(model, Layout(pp=4))
    assert parameters.total.sum() == model.parameters + 128256 * 2048
    # V-shaped: the first rank has embedding and head, but in two chunks, each with a matrix of its own.
    v_shaped = ranks_of(model, Layout(pp=4, schedule="zb-v", virtual_stages=2))
    assert v_shaped.total.sum() == model.parameters + 128256 * 2048
    assert ranks_of(model, Layout()).total.sum() == model.parameters


def test_ep_shards_experts_and_replicates_the_router() -> None:
    """Mixtral-8x7B, ep=4: 2 of 8 experts of 3·4096·14336 on each of 32 layers; the rest is whole."""
    model = Model.load("mixtral-8x7b")
    expert = 3 * 4096 * 14336
    parameters = ranks_of(model, Layout(dp=4, ep=4))
    assert parameters.experts[0] == 32 * 2 * expert
    assert parameters.trunk[0] == model.parameters - 32 * 8 * expert
    assert parameters.trunk[0] + 4 * parameters.experts[0] == model.parameters


def test_tp_shards_mla_up_projections_and_replicates_down_projections() -> None:
    """DeepSeek-V3 at tp=8, ep=32, pp=1, tensor by tensor.

    Per layer whole on every rank: kv down 7168·(512+64) + norm 512, q down 7168·1536 + norm 1536, two norms of 7168.
    Per layer cut by 8: q up 1536·128·192, kv up 512·128·(128+128), output 128·128·7168.
    """
    model = Model.load("deepseek-v3")
    whole = 7168 * 576 + 512 + 7168 * 1536 + 1536 + 2 * 7168
    cut = 1536 * 24576 + 512 * 32768 + 16384 * 7168
    dense_mlp, expert, router = 3 * 7168 * 18432, 3 * 7168 * 2048, 256 * 7168 + 256
    trunk = 61 * (whole + cut / 8) + 3 * dense_mlp / 8 + 58 * (router + expert / 8)
    ends = 2 * 129280 * 7168 / 8 + 7168
    parameters = ranks_of(model, Layout(dp=32, tp=8, ep=32))
    assert parameters.trunk[0] == trunk + ends
    assert parameters.experts[0] == 58 * 8 * expert / 8
    assert parameters.ends[0] == ends
    assert parameters.layer[0] == whole + cut / 8 + router + expert / 8 + 8 * expert / 8


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama-3-70b", Layout(tp=8, pp=4)),
        ("llama-3.1-405b", Layout(tp=8, pp=16)),
        ("deepseek-v2-lite", Layout(dp=8, tp=2, pp=4, ep=8)),
        ("deepseek-v3", Layout(dp=8, pp=16, ep=8, schedule="interleaved", virtual_stages=3)),
        ("gpt2-xl", Layout(pp=6, schedule="dualpipe-v", virtual_stages=2)),
    ],
)
def test_ranks_together_hold_all_parameters(name: str, layout: Layout) -> None:
    """Summed over tp, pp and ep ranks: the model, plus tp − 1 further copies of what tp does not cut, plus a tied copy."""
    model = Model.load(name)
    parameters = ranks_of(model, layout)
    everywhere = layout.tp * (parameters.trunk.sum() + layout.ep * parameters.experts.sum())
    whole = sum(weight.elements for weight in weights.attention(model) if weight.cut == "none")
    repeated = model.layers * (whole + 2 * weights.norm(model).elements) + weights.norm(model).elements
    repeated += model.moe_layers * (weights.elements(weights.router(model)) + weights.router_bias(model))
    tied_copy = model.vocab * model.hidden * model.tied_embeddings
    assert everywhere == pytest.approx(model.parameters + (layout.tp - 1) * repeated + tied_copy, rel=1e-12)
