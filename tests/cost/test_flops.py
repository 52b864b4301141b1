"""FLOPs and approximate parameters: the playbook's 6N, exact counts against published ones, conventions of MFU and HFU."""

from __future__ import annotations

import pytest

from builders import make_job
from ultrascale.cost import flops
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.estimate import estimate
from ultrascale.cost.operators import selective_flops
from ultrascale.specs import weights
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model


def test_the_playbooks_compute() -> None:
    """GPT-3: 6 · 175e9 · 300e9 = 3.15e23, Brown et al. 2020, appendix D (3.14e23)."""
    assert flops.compute_approximate(175e9, 300e9) == 3.15e23
    assert flops.compute_approximate(175e9, 300e9) == pytest.approx(3.14e23, rel=0.005)


@pytest.mark.parametrize(
    ("name", "megatron_bridge"),
    [("llama-3-8b", 5.147e10), ("llama-3-70b", 4.492e11), ("llama-3.1-405b", 2.524e12)],
)
def test_megatron_bridge_counts_the_same_causal_flops(name: str, megatron_bridge: float) -> None:
    """FLOP/token at 8k as Megatron-Bridge prints them: three times the forward, attention halved for the mask, head counted."""
    assert flops.model_flops(Model.load(name), 8192, causal=True) == pytest.approx(megatron_bridge, rel=2e-4)


def test_llama_8b_by_hand() -> None:
    """Forward per token: 2 · (q, o: 2·4096² + k, v: 2·4096·1024 + mlp: 3·4096·14336) a layer, scores 4·s·h, head 2·h·v.

    2·218,103,808 = 436,207,616 a layer; scores 4·8192·4096 = 134,217,728; head 2·4096·128256 = 1,050,673,152.
    """
    forward = 32 * (436_207_616 + 134_217_728) + 1_050_673_152
    assert flops.forward_flops(Model.load("llama-3-8b"), 8192, causal=False) == forward
    assert flops.model_flops(Model.load("llama-3-8b"), 8192) == 3 * forward == 57_912_852_480
    assert flops.model_flops(Model.load("llama-3-8b"), 8192, causal=True) == 3 * (forward - 32 * 134_217_728 / 2)


def test_torchtitans_convention() -> None:
    """6N + 12·L·h·s with N less the embedding: Llama-3-8B at 8k. Only the norms, which are no matmuls, differ.

    N − embedding = 8,030,261,248 − 525,336,576 = 7,504,924,672; 6N = 45,029,548,032; 12·32·4096·8192 = 12,884,901,888.
    """
    titan = 45_029_548_032 + 12_884_901_888
    ours = flops.model_flops(Model.load("llama-3-8b"), 8192)
    assert titan - ours == 6 * 65 * 4096
    assert ours == pytest.approx(titan, rel=1e-4)


def test_the_conventions_differ_by_an_eighth_at_8k() -> None:
    """published.csv's note: the same 8B run reads 12.5 % higher under one convention than under another."""
    model = Model.load("llama-3-8b")
    assert flops.model_flops(model, 8192) / flops.model_flops(model, 8192, causal=True) == pytest.approx(1.125, abs=0.001)


def test_gpt3_by_narayanan() -> None:
    """Narayanan 2021, equation 3: 96·B·s·L·h²·(1 + s/(6h) + V/(16·L·h)): full recomputation repeats layers, not the head."""
    per_token = 96 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 50257 / (16 * 96 * 12288))
    assert flops.hardware_flops(Model.load("gpt3-175b"), 2048, "full", "plain") == pytest.approx(per_token, rel=1e-9)


def test_gpt3_by_korthikanti() -> None:
    """Korthikanti 2022, appendix A: model FLOPs 72·B·L·s·h²·(1 + s/(6h) + V/(12·h·L)).

    Selective recomputation repeats one forward of the scores, L·4·s·h a token: 0.9 % for GPT-3. The paper's 2.7 % is s/(6h) =
    2048/73728, all of attention's FLOPs once more, forward and backward; the forward is a third of it.
    """
    model = Model.load("gpt3-175b")
    per_token = 72 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 50257 / (12 * 12288 * 96))
    assert flops.model_flops(model, 2048) == pytest.approx(per_token, rel=1e-9)
    again = flops.hardware_flops(model, 2048, "selective", "plain") - flops.model_flops(model, 2048)
    assert again == 96 * 4 * 2048 * 12288
    assert 3 * again / (72 * 96 * 12288**2) == pytest.approx(2048 / 73728)
    assert flops.hardware_flops(model, 2048, "selective", "flash") == flops.model_flops(model, 2048)


def test_moe_counts_active_experts_and_the_router() -> None:
    """Mixtral-8x7B per layer: attention 2·(2·4096² + 2·4096·1024), router 2·4096·8, two experts of 2·3·4096·14336."""
    model = Model.load("mixtral-8x7b")
    by_hand = 2 * (2 * 4096**2 + 2 * 4096 * 1024) + 2 * 4096 * 8 + 2 * 2 * 3 * 4096 * 14336
    assert flops.layer_matmul_flops(model, LayerKind(mlp="moe")) == by_hand


def test_mla_counts_latents_and_expansion() -> None:
    """DeepSeek-V3: q 7168·1536 + 1536·24576, kv 7168·576 + 512·32768, output 16384·7168, twice; scores 2·s·128·(192+128)."""
    model = Model.load("deepseek-v3")
    by_hand = 2 * (7168 * 1536 + 1536 * 24576 + 7168 * 576 + 512 * 32768 + 16384 * 7168)
    assert 2 * weights.elements(weight for weight in weights.attention(model) if weight.matmul) == by_hand
    assert flops.score_flops(model, 4096, causal=False, local=False) == 2 * 4096 * 128 * 320


def test_deepseek_v3_is_a_37b_model_to_compute() -> None:
    """DeepSeek-V3 report: 37B of 671B parameters active; 6 · 37e9 is the bulk of its FLOPs (embedding 0.93B computes none)."""
    model = Model.load("deepseek-v3")
    without_scores = flops.model_flops(model, 1)
    assert without_scores == pytest.approx(6 * (37.55e9 - 0.93e9), rel=0.01)


def test_a_window_bounds_the_scores() -> None:
    """Window 4096 of 32768: full 4096 per token; causal 4096·(1 − 4096/65536) = 3840, the ramp of the first window less."""
    model = Model.load("mistral-7b").model_copy(update={"sliding_window": 4096})
    width = 2 * model.heads * (model.qk_head_dim + model.v_head_dim)
    assert flops.score_flops(model, 32768, causal=False, local=True) == 4096 * width
    assert flops.score_flops(model, 32768, causal=True, local=True) == 3840 * width
    assert flops.score_flops(model, 2048, causal=True, local=True) == 1024 * width


def test_chunks_are_sequences_of_their_own() -> None:
    """Chunks of 4096: 2048 tokens in the mean; of 10240 tokens two chunks and a half: (2 · 4096² + 2048²) / (2 · 10240)."""
    model = Model.load("mistral-7b").model_copy(update={"sliding_window": 4096, "chunked_window": True})
    width = 2 * model.heads * (model.qk_head_dim + model.v_head_dim)
    assert flops.score_flops(model, 32768, causal=False, local=True) == 4096 * width
    assert flops.score_flops(model, 32768, causal=True, local=True) == 2048 * width
    assert flops.score_flops(model, 10240, causal=True, local=True) == 1843.2 * width
    assert flops.score_flops(model, 10240, causal=True, local=False) == 5120 * width


def test_only_layers_with_the_window_are_bounded_by_it() -> None:
    """Two local layers and a full one, of 3 layers and of 4: 2 · 3840 + 16384, and one local layer more."""
    pattern = {"sliding_window": 4096, "attention_pattern": ("local", "local", "full")}
    for layers, attended in ((3, 2 * 3840 + 16384), (4, 3 * 3840 + 16384)):
        model = Model.load("mistral-7b").model_copy(update={**pattern, "layers": layers})
        width = 2 * model.heads * (model.qk_head_dim + model.v_head_dim)
        assert flops.mixers_flops(model, 32768, causal=True) == pytest.approx(attended * width)
        assert flops.mixers_flops(model, 4096, causal=True) == pytest.approx(layers * 2048 * width)


def test_hfu_over_mfu() -> None:
    """Llama-3-8B at 8k: full recomputation repeats the layers' third, not the head's: 4/3 − 1,050,673,152 / 57,912,852,480."""
    job = Job(
        model=Model.load("llama-3-8b"),
        cluster=Cluster.load("8xh100"),
        seq=8192,
        batch_tokens=8192 * 8,
        framework=Framework.load("playbook"),
    )
    full = estimate(job, Layout(dp=8, zero=3, recompute="full"))
    assert full.hfu / full.mfu == pytest.approx(4 / 3 - 0.018142, abs=1e-5)
    for policy in ("none", "selective"):
        other = estimate(job, Layout(dp=8, zero=3, recompute=policy))
        assert other.hfu == other.mfu
    # MFU is FLOPs over peak over time: 57.91 GFLOP/token × tokens/s/GPU over 989.4 TFLOP/s.
    assert full.mfu == pytest.approx(57_912_852_480 * full.tokens_per_s_per_gpu / (job.peak_flops))
    assert full.model_tflops_per_gpu == pytest.approx(full.mfu * job.peak_flops / 1e12)
    assert full.mfu / full.mfu_causal == pytest.approx(1.125, abs=0.001)


@pytest.mark.parametrize(
    ("name", "approximate", "exact"),
    [
        # 50257·1600 + 48·(12·1600² + 13·1600) + 2·1600 = 80,411,200 + 48·30,740,800 + 3,200; exact adds 1024·1600 positions
        ("gpt2-xl", 1_555_972_800, 1_557_611_200),
        # 50257·12288 + 96·(12·12288² + 13·12288) + 2·12288 = 617,558,016 + 96·1,812,099,072 + 24,576; + 2048·12288 positions
        ("gpt3-175b", 174_579_093_504, 174_604_259_328),
    ],
)
def test_approximate_parameters_omit_only_positions(name: str, approximate: int, exact: int) -> None:
    model = Model.load(name)
    assert flops.parameters_approximate(model.hidden, model.layers, model.vocab) == approximate
    assert model.parameters == exact
    assert exact - approximate == model.max_positions * model.hidden


def test_approximate_parameters_are_wrong_for_gqa_with_gated_mlp() -> None:
    """Llama-3-8B: 128256·4096 + 32·(12·4096² + 13·4096) + 8192 = 6.97e9, the truth 8,030,261,248: 13 % more."""
    assert flops.parameters_approximate(4096, 32, 128256) == 6_969_499_648
    assert Model.load("llama-3-8b").parameters == 8_030_261_248


def test_fused_blocks_repeat_gate_and_up() -> None:
    """Two matmuls of hidden × ffn, in the layers that recompute."""
    model = Model.load("llama-3-8b")
    again = flops.hardware_flops(model, 8192, "selective", "flash", recomputed=0.5, fused=True) - flops.model_flops(model, 8192)
    assert again == pytest.approx(16 * 2 * 2 * 4096 * 14336)


ATTENTION_OUT, EXPERTS, ROUTER = 2 * 4096 * 2048, 2 * 8 * 3 * 2048 * 768, 2 * 2048 * 128
PADDING = 2 * 3 * 2048 * 768 * 128 * 8 // 8192  # 8 rows for each of 128 experts, beside those of 8192 tokens


@pytest.mark.parametrize(
    ("framework", "model", "repeated"),
    [
        ("torchtitan", "llama-3-8b", 2 * 4096 * (4096 + 14336)),  # attention's output and up
        ("torchtitan-0.2", "llama-3-8b", 2 * 4096 * (1024 + 4096 + 14336)),  # and k
        ("torchtitan", "qwen3-30b-a3b", ATTENTION_OUT + ROUTER + EXPERTS),
        ("torchtitan-0.2", "qwen3-30b-a3b", ATTENTION_OUT + ROUTER + EXPERTS + 2 * 2048 * 512 + PADDING),
    ],
)
def test_torchtitan_repeats_every_second_matmul(framework: str, model: str, repeated: int) -> None:
    """Selective recomputation, of one layer per token; of experts all (activation_checkpoint.py)."""
    job = make_job(model, framework=framework)
    assert selective_flops(job, LayoutColumns.of([Layout(dp=8, zero=3)])) == repeated * job.model.layers


def test_compiled_code_repeats_nothing_for_what_is_kept() -> None:
    """With tp the result of a reduce-scatter is kept; operator by operator attention's last matmul is repeated for nothing."""
    columns = LayoutColumns.of([Layout(dp=4, tp=2, zero=3)])
    compiled, eager = (selective_flops(make_job(framework=name), columns) for name in ("torchtitan", "torchtitan-eager"))
    assert eager - compiled == 32 * 2 * 4096 * 4096
