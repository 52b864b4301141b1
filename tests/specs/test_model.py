"""Model: exact parameter counts of every preset, their groups, loading, and helpful errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ultrascale.specs import weights
from ultrascale.specs.errors import SpecError
from ultrascale.specs.model import Model, _preset_index
from ultrascale.specs.validate import build
from ultrascale.specs.weights import elements


def glm_mtp(h: int, experts: int, ffn: int, qk_norms: int) -> int:
    """The module of GLM-4.5 that predicts a second token: attention with 96 heads of 128 and 8 of keys and values, biases on
    them, a router with its bias, experts with one shared, two norms; then the projection of two hidden states and three norms.
    """
    attention = 2 * h * 12_288 + 2 * h * 1024 + 12_288 + 2 * 1024 + qk_norms
    return attention + experts * (h + 1) + (experts + 1) * 3 * h * ffn + 2 * h + 2 * h * h + 3 * h


# Totals of the published checkpoints, tied matrices once.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    # With the 58 x 256 elements of e_score_correction_bias: in the checkpoint, but a buffer in transformers.
    "deepseek-v3": 671_026_419_200,
    "smollm-135m": 134_515_008,
    "smollm-360m": 361_821_120,
    "smollm-1.7b": 1_711_376_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "llama-4-scout-17b-16e": 107_769_861_120,
    "llama-4-maverick-17b-128e": 400_711_848_960,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "command-r-35b": 34_980_831_232,
    "command-r-08-2024": 32_296_476_672,
    "aya-23-8b": 8_028_033_024,
    "deepseek-llm-7b": 6_910_365_696,
    "deepseek-llm-67b": 67_425_001_472,
    "deepseek-coder-1.3b": 1_346_471_936,
    "deepseek-coder-6.7b": 6_740_512_768,
    "deepseek-coder-33b": 33_342_991_360,
    "falcon3-1b": 1_669_408_768,
    "falcon3-3b": 3_227_655_168,
    "falcon3-7b": 7_455_550_464,
    "falcon3-10b": 10_305_653_760,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "glm-4-9b": 9_399_951_360,
    "glm-4-9b-0414": 9_400_279_040,
    "glm-4-32b-0414": 32_566_081_536,
    "cerebras-gpt-111m": 111_050_496,
    "cerebras-gpt-256m": 255_977_024,
    "cerebras-gpt-590m": 590_310_912,
    "cerebras-gpt-1.3b": 1_315_723_264,
    "cerebras-gpt-2.7b": 2_651_553_280,
    "cerebras-gpt-6.7b": 6_658_404_352,
    "cerebras-gpt-13b": 12_853_386_240,
    "granite-3.0-2b": 2_533_531_648,
    "granite-3.0-8b": 8_170_848_256,
    "granite-3.3-2b": 2_533_539_840,
    "granite-3.3-8b": 8_170_864_640,
    "granite-3.0-1b-a400m": 1_334_628_352,
    "granite-3.0-3b-a800m": 3_298_793_472,
    "kimi-k2": 1_026_408_232_448,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "codellama-7b": 6_738_546_688,
    "codellama-13b": 13_016_028_160,
    "codellama-34b": 33_743_970_304,
    "codellama-70b": 68_976_910_336,
    "tinyllama-1.1b": 1_100_048_384,
    "openllama-3b": 3_426_473_600,
    "sheared-llama-1.3b": 1_345_423_360,
    "solar-10.7b": 10_731_524_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-22b": 22_247_282_688,
    "mistral-small-24b": 23_572_403_200,
    "mistral-large-123b": 122_610_069_504,
    "minitron-4b": 4_190_509_056,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "olmo-3-7b": 7_298_011_136,
    "olmo-3-32b": 32_233_522_176,
    "olmoe-1b-7b": 6_919_161_856,
    "stablelm-3b": 2_795_443_200,
    "stablelm-2-1.6b": 1_644_515_328,
    "seed-oss-36b": 36_151_104_512,
    "ernie-4.5-0.3b": 360_748_032,
    "exaone-4.0-1.2b": 1_279_391_488,
    "exaone-4.0-32b": 32_003_216_384,
    "minimax-m2": 228_689_764_864,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "qwen2-0.5b": 494_032_768,
    "qwen1.5-0.5b": 463_987_712,
    "qwen1.5-1.8b": 1_836_828_672,
    "qwen1.5-7b": 7_721_324_544,
    "qwen1.5-14b": 14_167_290_880,
    "qwen1.5-32b": 32_512_218_112,
    "qwen1.5-72b": 72_287_920_128,
    "qwen1.5-110b": 111_209_914_368,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-57b-a14b": 57_408_658_944,
    "qwen3-4b-2507": 4_022_468_096,
    "qwen3-30b-a3b-2507": 30_532_122_624,
    "qwen3-235b-a22b-2507": 235_093_634_560,
    "qwen3-coder-30b-a3b": 30_532_122_624,
    "qwen3-coder-480b-a35b": 480_154_875_392,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "yi-6b": 6_061_035_520,
    "yi-34b": 34_388_917_248,
    "yi-1.5-6b": 6_061_035_520,
    "yi-1.5-9b": 8_829_407_232,
    "yi-1.5-34b": 34_388_917_248,
    # Checkpoints less their vision tower (27 layers of 1152, 4,096 patches of 14 × 14) and its projection with a norm.
    "gemma-3-4b": 4_300_079_472 - 416_866_032 - 1152 * (2560 + 1),
    "gemma-3-12b": 12_187_325_040 - 416_866_032 - 1152 * (3840 + 1),
    "gemma-3-27b": 27_432_406_640 - 416_866_032 - 1152 * (5376 + 1),
    # Checkpoints less their multi-token-prediction module: a layer with experts, a projection of two hidden states and three
    # norms; GLM-4.5's also has an embedding and a head.
    "glm-4.5-air": 110_468_824_832 - glm_mtp(4096, 128, 1408, 0) - 2 * 151_552 * 4096,
    "glm-4.5": 358_337_791_296 - glm_mtp(5120, 160, 1536, 2 * 128) - 2 * 151_552 * 5120,
    "glm-4.6": 356_785_898_816 - glm_mtp(5120, 160, 1536, 2 * 128),
    # As transformers builds it, which leaves the checkpoint's multi-token-prediction module out.
    "qwen3-next-80b-a3b": 79_674_391_296,
    "nemotron-h-4b": 4_489_223_040,
    "nemotron-h-8b": 8_100_852_736,
    "nemotron-h-47b": 46_791_554_816,
    "nemotron-h-56b": 56_324_350_464,
    "nemotron-3-nano-30b-a3b": 31_577_940_288,
    "nemotron-nano-9b-v2": 8_888_227_328,
    "nemotron-nano-12b-v2": 12_310_001_152,
    "qwen3.5-0.8b": 752_393_024,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.5-122b-a10b": 122_111_526_912,
    "qwen3.5-397b-a17b": 396_346_350_336,
}


def gpt(layers: int, h: int, vocab: int, positions: int) -> int:
    """Attention 4h² + 4h, MLP 8h² + 5h, two LayerNorms 4h, per layer; embeddings, positions and a last LayerNorm."""
    return layers * (12 * h * h + 13 * h) + (vocab + positions + 2) * h


# No checkpoint was published: by hand from the papers' tables. GPT-3's paper (appendix D) says 174,600 million;
# Korthikanti et al. round theirs to 22B, 530B and 1T.
BY_HAND = {
    "gpt3-175b": gpt(96, 12288, 50257, 2048),
    "gpt-22b": gpt(48, 6144, 51200, 2048),
    "mt-nlg-530b": gpt(105, 20480, 51200, 2048),
    "gpt-1t": gpt(128, 25600, 51200, 2048),
    "gpt3-125m": gpt(12, 768, 50257, 2048),
    "gpt3-355m": gpt(24, 1024, 50257, 2048),
    "gpt3-760m": gpt(24, 1536, 50257, 2048),
    "gpt3-2.7b": gpt(32, 2560, 50257, 2048),
    "gpt3-5b": gpt(24, 4096, 51200, 2048),
    "gpt3-20b": gpt(44, 6144, 51200, 2048),
    # No biases but the norms', two matrices of 4h, untied 256,000 tokens; 340B has 8 of 96 heads for keys and values.
    "nemotron-8b": 32 * (12 * 4096**2 + 4 * 4096) + 2 * 256_000 * 4096 + 2 * 4096,
    "nemotron-22b": 40 * (12 * 6144**2 + 4 * 6144) + 2 * 256_000 * 6144 + 2 * 6144,
    "nemotron-340b": 96 * (18432**2 * (2 + 2 / 12 + 8) + 4 * 18432) + 2 * 256_000 * 18432 + 2 * 18432,
    "nemotron-15b": 32 * (2 * 6144**2 + 2 * 6144 * 1024 + 2 * 6144 * 24576 + 4 * 6144) + 2 * 256_000 * 6144 + 2 * 6144,
    # MLA: q 2048·16·192, latent 2048·576 + 512, up 512·16·256, out 2048·2048; 64 experts and 2 shared of 3·2048·1408.
    "moonlight-16b-a3b": 27 * (2048 * 3072 + 2048 * 576 + 512 + 512 * 4096 + 2048 * 2048 + 2 * 2048)
    + 3 * 2048 * 11264
    + 26 * (66 * 3 * 2048 * 1408 + 64 * 2048 + 64)
    + 2 * 163_840 * 2048
    + 2048,
    # 8 layers of q and o 64·64, k and v 64·32, three 64·192 and two norms; two 256·64 tables and a norm.
    "tiny": 8 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64) + 2 * 256 * 64 + 64,
    # The same but for the MLP: a router 8·64 and 8 experts of three 64·64.
    "tiny-moe": 8 * (2 * 64 * 64 + 2 * 64 * 32 + 8 * 64 + 8 * 3 * 64 * 64 + 2 * 64) + 2 * 256 * 64 + 64,
    "mini": 2 * 256 * 256 + 6 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 768 + 2 * 256) + 256,
}

FIELDS: dict[str, Any] = {"name": "x", "layers": 2, "hidden": 64, "heads": 8, "ffn": 128, "vocab": 100}
MOE: dict[str, Any] = {"experts": 4, "top_k": 2, "expert_ffn": 8}


@pytest.mark.parametrize(("name", "total"), (PUBLISHED | BY_HAND).items())
def test_parameters_equal_the_published_total(name: str, total: int) -> None:
    assert Model.load(name).parameters == total


def test_every_preset_has_a_known_total_and_a_source() -> None:
    assert set(Model.presets()) == set(PUBLISHED | BY_HAND)
    assert all(model.source and model.name == name for name, model in Model.presets().items())


def test_gpt3_matches_the_total_its_paper_prints() -> None:
    assert round(Model.load("gpt3-175b").parameters, -8) == 174_600_000_000


@pytest.mark.parametrize(
    ("name", "billions"),  # As the model cards and reports print them.
    [("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39.2), ("qwen3-30b-a3b", 3.4), ("qwen3-235b-a22b", 22.2)],
)
def test_active_parameters(name: str, billions: float) -> None:
    assert round(Model.load(name).active_parameters / 1e9, 1) == billions


def test_multi_token_prediction_of_published_checkpoints() -> None:
    # Their totals, less the embedding and head that layer 61 of DeepSeek-V3 and 92 of GLM-4.5 have once more.
    def with_layer(name: str) -> int:
        return Model.load(name).model_copy(update={"mtp_depth": 1}).parameters

    assert with_layer("deepseek-v3") == 684_489_845_504 - 2 * 129_280 * 7168
    assert with_layer("glm-4.5") == 358_337_791_296 - 2 * 151_552 * 5120
    assert with_layer("glm-4.6") == 356_785_898_816


def test_active_parameters_of_deepseek_v3_by_hand() -> None:
    # Idle per MoE layer: 248 of 256 experts of three 7168 x 2048 matrices. The report's 37B leaves out the embedding.
    model = Model.load("deepseek-v3")
    assert model.active_parameters == 671_026_419_200 - 58 * 248 * 3 * 7168 * 2048
    assert round((model.active_parameters - elements(weights.embedding(model))) / 1e9) == 37


@pytest.mark.parametrize("name", sorted(PUBLISHED | BY_HAND))
def test_groups_add_up(name: str) -> None:
    model = Model.load(name)
    layers = sum(elements(weights.layer_weights(model, model.kind(index))) for index in range(model.layers))
    layers += model.moe_layers * weights.router_bias(model)
    experts = model.moe_layers * (model.moe.experts if model.moe else 0) * model.expert_parameters
    head = 0 if model.tied_embeddings else model.vocab * model.hidden
    ends = elements(weights.embedding(model)) + head + weights.norm(model).elements
    assert layers + experts + ends == model.parameters
    assert sum(model.is_moe_layer(index) for index in range(model.layers)) == model.moe_layers
    assert model.moe_layers + model.dense_layers == sum(kind.mlp != "none" for kind in model.each_kind)


def test_groups_of_deepseek_v3_by_hand() -> None:
    model = Model.load("deepseek-v3")
    assert (model.qk_head_dim, model.v_head_dim, model.q_dim, model.kv_dim) == (192, 128, 24576, 24576)
    queries = 7168 * 1536 + 1536 + 1536 * 128 * 192
    keys_values = 7168 * (512 + 64) + 512 + 512 * 128 * (128 + 128)
    assert elements(weights.attention(model)) == queries + keys_values + 128 * 128 * 7168
    assert elements(weights.router(model)) + weights.router_bias(model) == 256 * 7168 + 256
    assert model.expert_parameters == elements(weights.shared_expert(model)) == 3 * 7168 * 2048
    assert (model.dense_layers, model.is_moe_layer(2), model.is_moe_layer(3)) == (3, False, True)


def test_groups_of_qwen_by_hand() -> None:
    qwen2, qwen3 = Model.load("qwen2.5-7b"), Model.load("qwen3-0.6b")
    assert elements(weights.attention(qwen2)) == 2 * 3584 * 3584 + 2 * 3584 * 512 + (3584 + 2 * 512)
    assert (qwen3.q_dim, qwen3.kv_dim) == (2048, 1024)  # head_dim 128 makes queries wider than hidden = 1024.
    assert elements(weights.attention(qwen3)) == 2 * 1024 * 2048 + 2 * 1024 * 1024 + 2 * 128
    assert qwen3.tied_embeddings


def test_biases_and_learned_positions_of_gpt2_by_hand() -> None:
    model = Model.load("gpt2")
    assert not model.gated
    assert elements(weights.attention(model)) == 4 * 768 * 768 + 4 * 768
    assert elements(weights.mlp(model, model.ffn)) == 2 * 768 * 3072 + 3072 + 768
    assert weights.norm(model).elements == 2 * 768
    assert elements(weights.embedding(model)) == (50257 + 1024) * 768


@pytest.mark.parametrize(
    ("name", "theta", "factor", "eps"),
    [
        ("llama-2-7b", 1e4, None, 1e-5),
        ("llama-3-8b", 5e5, None, 1e-5),
        ("llama-3.1-405b", 5e5, 8, 1e-5),
        ("llama-3.2-1b", 5e5, 32, 1e-5),
        ("qwen2.5-7b", 1e6, None, 1e-6),
        ("qwen2.5-14b", 1e6, None, 1e-5),  # the base model's; its Instruct release has 1e-6
        ("qwen3-8b", 1e6, None, 1e-6),
        ("mistral-7b", 1e4, None, 1e-5),
        ("smollm2-1.7b", 1.3e5, None, 1e-5),
    ],
)
def test_wavelengths_and_norms_of_the_published_configs(name: str, theta: float, factor: float | None, eps: float) -> None:
    model = Model.load(name)
    scaling = model.rope_scaling
    assert (model.rope_theta, scaling and scaling.factor, model.norm_eps) == (theta, factor, eps)


def test_layer_index_is_checked() -> None:
    with pytest.raises(IndexError, match="layer 8 of a model with 8 layers"):
        Model.load("tiny").is_moe_layer(8)


def test_defaults_are_derived() -> None:
    model = build(Model, FIELDS, "model")
    assert (model.kv_heads, model.head_dim, model.gated) == (8, 8, True)
    moe = build(Model, {**FIELDS, "ffn": 0, "moe": {**MOE, "shared_experts": 3}}, "model").moe
    assert moe is not None
    assert moe.shared_expert_ffn == 24


def test_a_model_is_frozen_hashable_and_survives_a_round_trip() -> None:
    for model in Model.presets().values():
        assert build(Model, model.model_dump(), "model") == model
        assert isinstance(hash(model), int)
    with pytest.raises(ValidationError):
        Model.load("tiny").layers = 3


@pytest.mark.parametrize(("alias", "name"), [("llama-3-405b", "llama-3.1-405b"), ("LLaMA-3-1B", "llama-3.2-1b")])
def test_names_are_found_by_alias_and_in_any_case(alias: str, name: str) -> None:
    assert Model.load(alias) is Model.load(name)
    assert alias.lower() in Model.preset_names()


def test_aliases_name_presets_and_shadow_none() -> None:
    index = _preset_index()
    assert set(index.values()) == set(Model.presets())
    assert all(index[name] == name == name.lower() for name in Model.presets())


def test_load_reads_yaml_and_hf_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("layers: 2\nhidden: 64\nheads: 8\nffn: 128\nvocab: 100\n")
    assert Model.load(file) == Model.load(str(file)) == build(Model, {**FIELDS, "name": "mine"}, "model")
    folder = tmp_path / "my-gpt"
    folder.mkdir()
    config = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    (folder / "config.json").write_text(json.dumps(config))
    loaded = Model.load(folder)
    assert loaded.parameters == PUBLISHED["gpt2"]
    assert loaded.name == Model.load(folder / "config.json").name == "my-gpt"


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        ("llama-3-8bb", "did you mean 'llama-3-8b'"),
        ("meta-llama/Llama-3.1-8B", "did you mean 'llama-3.1-8b'"),
        ("kimi", "did you mean 'kimi-k2'"),
        ("zzz", "list presets with `ultrascale presets`"),
        ("", "neither a preset nor a file"),
        ("no-such.yaml", "model file no-such.yaml does not exist"),
        ("x" * 5000, "neither a preset nor a file"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(ref: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Model.load(ref)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "layers: 2\n  hidden: [", "line 2"),
        ("a.json", '{"model_type":\n oops}', "line 2"),
        ("a.yaml", "- 1\n- 2\n", "mapping"),
        ("a.yaml", "", "mapping"),
        ("a.yaml", "!!python/object/apply:os.system ['true']\n", "a.yaml"),
        ("a.json", "[" * 100_000, "a.json"),
        ("config.json", "{}", "config.model_type is missing"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError, match=says):
        Model.load(tmp_path / name)


def test_a_folder_without_config_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"has no config\.json"):
        Model.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kv_heads": 5, "heads": 32}, "model.kv_heads is 5 but must divide heads = 32: try 4 or 8"),
        ({"layers": 0}, "model.layers is 0 but must be greater than 0: try 32"),
        ({"layers": -3}, "model.layers is -3 but must be greater than 0: try 32"),
        ({"layers": 1.5}, "model.layers is 1.5 but must be a whole number greater than 0: try 32"),
        ({"layers": 2.0}, "model.layers is 2.0 but must be a whole number greater than 0: try 32"),
        ({"layers": True}, "model.layers is true but must be a whole number greater than 0: try 32"),
        ({"layers": "32"}, "model.layers is '32' but must be a whole number greater than 0: try 32"),
        ({"layers": 10**6}, "model.layers is 1000000 but must be at most 65536: try 32"),
        ({"tied_embeddings": "no"}, "model.tied_embeddings is 'no' but must be true or false: try false"),
        ({"kvheads": 4}, "model.kvheads is not a field of model: did you mean 'kv_heads' or 'heads'?"),
        ({"hidden": 65}, "hidden = 65 is not a multiple of heads = 8: give it, e.g. 8"),
        ({"positions": "learned"}, "model.max_positions is missing but positions: learned needs"),
        ({"ffn": 0}, "model.ffn is 0 but 2 layers have a dense MLP: try 256"),
        (
            {"activation": "swigl"},
            "model.activation is 'swigl' but must be 'swiglu', 'geglu', 'geglu_exact', 'clamped_swiglu', 'gelu', 'gelu_exact', "
            "'relu' or 'relu2'",
        ),
        (
            {"activation": "clamped_swiglu"},
            "model.swiglu_limit is missing but activation is clamped_swiglu: try clamped_swiglu",
        ),
        ({"chunked_window": True}, "model.chunked_window is true but no layer has a sliding window: give"),
        ({"qk_l2_norm": True, "qk_norm": True}, "model.qk_l2_norm is true but qk_norm is true, and"),
        ({"attention_temperature": {"scale": 0.1, "tokens": 8}}, "model.attention_temperature is set but every layer rotates"),
        (
            {"attention_sinks": True, "attention_softcap": 5.0},
            "model.attention_softcap is 5 but attention_sinks is true: leave",
        ),
        ({"moe": 5}, "model.moe is 5 but must be a mapping of fields to values: try {experts: 8, top_k: 2"),
        ({"moe": {**MOE, "top_k": 8}}, "model.moe.top_k is 8 but there are only experts = 4: try 2"),
        ({"moe": {**MOE, "topk": 1}}, "model.moe.topk is not a field of model.moe: did you mean 'top_k'?"),
        ({"moe": {**MOE, "dense_layers": 9}}, "model.moe.dense_layers is 9 but there are only layers = 2: try 1"),
        ({"moe": {**MOE, "shared_gate": True}}, "model.moe.shared_gate is true but shared_experts is 0"),
        ({"moe": {**MOE, "shared_expert_ffn": 8}}, "model.moe.shared_expert_ffn is 8 but shared_experts is 0"),
        ({"norm_eps": 0}, "model.norm_eps is 0 but must be greater than 0: try 1e-05"),
        ({"rope_theta": "1e4"}, "model.rope_theta is '1e4' but must be a number greater than 0"),
        ({"rope_scaling": {"factor": 8.0}}, "model.rope_scaling.original_max_positions is missing: give it, e.g. 8192"),
        (
            {"rope_scaling": {"factor": 8.0, "original_max_positions": 8192, "low_freq_factor": 5.0}},
            "model.rope_scaling.high_freq_factor is 4 but must be at least low_freq_factor = 5: try 20",
        ),
        (
            {"rope_scaling": {"rope_type": "yarm", "factor": 8.0}},
            "model.rope_scaling.rope_type is 'yarm' but must be 'llama3', 'linear', 'dynamic' or 'yarn': did you mean 'yarn'",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0, "beta_fast": 16.0}},
            "model.rope_scaling.beta_fast is 16.0 but rope_type linear does not read it: leave it out",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
            "model.rope_scaling.original_max_positions is missing: give it, e.g. 8192",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_positions": 64, "mscale": 1.0}},
            "model.rope_scaling.mscale_all_dim is missing but mscale is 1: give both or neither, e.g. 1.0",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "original_max_positions": 64,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "attention_factor": 1.5,
                }
            },
            "model.rope_scaling.attention_factor is 1.5 but it follows from mscale",
        ),
        (
            {"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_positions": 64}},
            "model.rope_theta is 1 but rope_scaling.rope_type: yarn needs a base greater than 1: try 10000",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "model.max_positions is missing but rope_scaling.rope_type: dynamic changes the base of longer sequences",
        ),
        (
            {"head_dim": 2, "max_positions": 64, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "model.head_dim is 2 but rope_scaling.rope_type: dynamic needs more than 2: try 64",
        ),
        ({"mla": {}}, "model.mla.kv_lora_rank is missing: give it, e.g. 512; model.mla.qk_nope_head_dim is missing"),
    ],
)
def test_each_mistake_has_an_error(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        build(Model, {**FIELDS, **change}, "model")
    assert sentence in str(caught.value)


MLA = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kv_heads": 4}, "model.kv_heads is 4 but with mla every head has its own keys: try 8"),
        ({"head_dim": 8}, "model.head_dim is 8 but with mla it is qk_nope_head_dim + qk_rope_head_dim: try 12"),
        ({"qk_norm": True}, "model.qk_norm is true but mla has no such parameters: try false"),
        ({"rotary_dim": 4}, "model.rotary_dim is 4 but with mla qk_rope_head_dim is rotated: leave it out"),
    ],
)
def test_latent_attention_refuses_unsupported_fields(change: dict[str, Any], sentence: str) -> None:
    assert build(Model, {**FIELDS, "mla": MLA}, "model").head_dim == 12
    with pytest.raises(SpecError) as caught:
        build(Model, {**FIELDS, "mla": MLA, **change}, "model")
    assert sentence in str(caught.value)


class Leaf(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int


class Tree(BaseModel):
    model_config = ConfigDict(extra="forbid")
    leaves: list[Leaf] = []
    named: dict[str, Leaf] = {}
    either: Leaf | str = "none"
    limit: float | None = None

    @model_validator(mode="after")
    def _small(self) -> Tree:
        if len(self.leaves) > 1:
            raise ValueError("tree.leaves has 2 entries: try 1")
        return self


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"leaves": [{"size": "q"}]}, "tree.leaves.0.size is 'q' but must be a whole number"),
        (
            {"named": {"oak": {"size": 1, "siz": 1}}},
            "tree.named.oak.siz is not a field of tree.named.oak: did you mean 'size'?",
        ),
        ({"either": {"size": None}}, "tree.either.size is null but must be a whole number; tree.either is a mapping"),
        ({"limit": "much"}, "tree.limit is 'much' but must be a number"),
        ({"leaves": 3}, "tree.leaves is 3 but must be a list"),
        ({1: 2}, "tree has the key 1 but fields are named by text"),
        ([1], "tree is a list but must be a mapping of fields to values"),
        (None, "tree is empty but must be a mapping of fields to values"),
    ],
)
def test_build_names_nested_fields(data: Any, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        build(Tree, data, "tree")
    assert str(caught.value).startswith(sentence)


def test_build_keeps_a_validators_message() -> None:
    with pytest.raises(SpecError) as caught:
        build(Tree, {"leaves": [{"size": 1}, {"size": 2}]}, "tree")
    assert str(caught.value) == "tree.leaves has 2 entries: try 1"
