"""Low-rank adapters on frozen weights: states, GEMMs and activations by hand, and who refuses them."""

from __future__ import annotations

import pytest

from builders import make_job
from ultrascale.cost import engines
from ultrascale.cost.estimate import estimate
from ultrascale.measure.accuracy.runs import read_row
from ultrascale.specs import weights
from ultrascale.specs.errors import SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

RANK = 16
LAYERS, HIDDEN, FFN, VOCAB = 32, 4096, 11008, 32000  # llama-2-7b: as many kv heads as heads
GEMMS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * FFN)  # elements
WEIGHTS = 2 * VOCAB * HIDDEN + HIDDEN + GEMMS + LAYERS * 2 * HIDDEN
ADAPTERS = LAYERS * RANK * (HIDDEN + 3 * HIDDEN)
SEQ = 4096


def job(rank: int | None, layout: Layout, framework: str = "playbook", model: str = "llama-2-7b") -> Job:
    return make_job(model, f"{layout.gpus}xh100", SEQ, layout, framework).changed(adapter_rank=rank, adapter_targets="qkv")


def test_only_adapters_have_gradients_and_states() -> None:
    """Weights in bf16, adapters too; of the adapters fp32 masters, gradients and two moments, on one GPU."""
    alone = Layout(gas=4)
    found = estimate(job(RANK, alone), alone).memory[0].memory
    assert found.parameters == pytest.approx(2 * (WEIGHTS + ADAPTERS))
    assert (found.master, found.gradients, found.optimizer) == pytest.approx((4 * ADAPTERS, 4 * ADAPTERS, 8 * ADAPTERS))


def test_adapters_beside_latent_attention_and_shared_experts() -> None:
    """DeepSeek-V3: beside the projections to the latents, from them and of the output; dense MLPs of three layers, 58 shared
    experts. Routed experts and routers have none.
    """
    model, h = Model.load("deepseek-v3"), 7168
    attention = (h + 576) + (h + 1536) + (1536 + 128 * 192) + (512 + 128 * 256) + (128 * 128 + h)
    elements = 61 * attention + 3 * 3 * (h + 18432) + 58 * 3 * (h + 2048)
    found = sum(
        count * weights.elements(weights.adapters(model, kind, RANK, True, False)) for kind, count in model.layer_kinds.items()
    )
    assert found == RANK * elements


def test_frozen_weights_of_zero_3_stay_in_bf16() -> None:
    """FSDP's shards of trained weights are fp32 masters."""
    sharded = Layout(dp=8, zero=3)
    found = estimate(job(RANK, sharded, "eager"), sharded).memory[0].memory
    assert found.parameters == pytest.approx(2 * WEIGHTS / 8, rel=0.001)
    assert found.master == pytest.approx(4 * ADAPTERS / 8, rel=0.001)


def test_a_step_has_two_thirds_of_the_gemms() -> None:
    alone = Layout(mbs=2, gas=4, recompute="full")
    full, adapters = (estimate(job(rank, alone), alone) for rank in (None, RANK))
    # The adapters' own GEMMs have few FLOPs, but read the layer's input and write its output.
    assert 2 / 3 < adapters.time.matmul_s / full.time.matmul_s < 0.70
    assert adapters.time.attention_s == full.time.attention_s
    assert adapters.time.optimizer_s < 0.01 * full.time.optimizer_s
    scores = 3 * LAYERS * 4 * SEQ * HIDDEN
    per_token = adapters.model_tflops_per_gpu * 1e12 / adapters.tokens_per_s_per_gpu
    assert per_token == pytest.approx(2 * 2 * (GEMMS + VOCAB * HIDDEN) + scores)


def test_gemms_of_frozen_weights_keep_no_input() -> None:
    """Of an MLP those of gate and up, and of down: s·h and s·f at two bytes."""
    alone = Layout(gas=4)
    kept = [{item.module: item.bytes for item in estimate(job(rank, alone), alone).activations} for rank in (None, RANK)]
    assert kept[0]["mlp input"] == 2 * SEQ * HIDDEN * LAYERS
    assert kept[0]["mlp activation"] == 2 * SEQ * FFN * LAYERS
    assert not {"mlp input", "mlp activation"} & set(kept[1])
    assert kept[1]["qkv input"] == kept[0]["qkv input"]


def test_what_is_reduced_shrinks_with_the_adapters() -> None:
    spread = Layout(dp=16, zero=1)
    full, adapters = (estimate(job(rank, spread), spread) for rank in (None, RANK))
    assert adapters.time.data_s < 0.1 * full.time.data_s


def test_recurrences_and_engines_refuse_adapters() -> None:
    with pytest.raises(SpecError, match=r"job\.adapter_rank is 16 but .* has linear attention"):
        job(RANK, Layout(dp=8), model="qwen3-next-80b-a3b")
    for name in ("torchtitan", "megatron-core", "nanotron", "deepspeed", "accelerate"):
        assert "has no such setting: try null" in (engines.job_problem(job(RANK, Layout(dp=8), name)) or ""), name
    for name in ("playbook", "ultrascale"):
        assert engines.job_problem(job(RANK, Layout(dp=8), name)) is None


def test_a_row_says_its_adapters() -> None:
    cells = {"id": "a", "model": "LLAMA2-7B LoRA", "seq_len": "4096", "gpu": "H100", "gpus": "8", "micro_batch": "1"}
    silent, stated = read_row(cells, 2), read_row({**cells, "adapter_rank": "64"}, 2)
    assert silent.job is not None
    assert stated.job is not None
    assert (silent.job.adapter_rank, stated.job.adapter_rank) == (16, 64)
    assert "LoRA of rank 16 on q, k, v" in silent.assumptions
