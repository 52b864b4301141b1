"""Model presets: transformers builds each with the same total, published defaults read as them, and each can be planned."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from tests.builders import make_job

from ultrascale.cost.estimate import estimate
from ultrascale.plan.search import plan
from ultrascale.specs.hf_config import config_of, family_of
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

PRESETS = Model.presets()
FIRST_OF_FAMILY = [next(iter(members)) for members in Model.preset_families().values()]


def test_there_are_at_least_110_in_families() -> None:
    assert len(PRESETS) >= 110
    families = Model.preset_families()
    assert [name for members in families.values() for name in members] == list(PRESETS)
    assert families["gpt-oss"] == {name: PRESETS[name] for name in ("gpt-oss-20b", "gpt-oss-120b")}


def test_names_and_sources_are_of_one_form() -> None:
    for name, model in PRESETS.items():
        assert re.fullmatch(r"[a-z0-9.-]+", name)
        if "huggingface.co" in model.source:
            assert re.match(r"huggingface\.co/[\w.-]+/[\w.-]+ config\.json", model.source), name


@pytest.mark.quick_cases(*FIRST_OF_FAMILY, "qwen3-next-80b-a3b", "exaone-4.0-1.2b", "minimax-m2", "llama-4-maverick-17b-128e")
@pytest.mark.parametrize("name", PRESETS)
def test_transformers_builds_the_same_total(name: str) -> None:
    config = config_of(PRESETS[name], "bf16")
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**{key: value for key, value in config.items() if key != "torch_dtype"})
        )
    biases = sum(one.numel() for key, one in built.named_buffers() if key.endswith("e_score_correction_bias"))
    assert sum(one.numel() for one in built.parameters()) + biases == PRESETS[name].parameters


QWEN3_5 = {
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25, "mrope_section": [11] * 3},
}
# Classes whose defaults are a published model, and the keys in which the release differs from them.
DEFAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-7b": ("llama", {}),
    "mistral-7b": ("mistral", {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5}),
    "mixtral-8x7b": ("mixtral", {"max_position_embeddings": 32768}),
    "gemma-7b": ("gemma", {}),
    "gemma-2-2b": ("gemma2", {}),
    "phi-3-mini": ("phi3", {"sliding_window": 2047}),
    "glm-4-9b": ("glm", {"max_position_embeddings": 8192}),
    "glm-4-9b-0414": ("glm4", {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5}),
    "command-r-35b": ("cohere", {"rope_parameters": {"rope_type": "default", "rope_theta": 8e6}}),
    "gpt-neox-20b": ("gpt_neox", {"hidden_act": "gelu_fast"}),
    "stablelm-3b": ("stablelm", {}),
    "ernie-4.5-0.3b": ("ernie4_5", {}),
    "gpt2": ("gpt2", {}),
    "gpt-oss-120b": ("gpt_oss", {}),
    "llama-4-scout-17b-16e": (
        "llama4_text",
        {
            "max_position_embeddings": 10485760,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "llama-4-maverick-17b-128e": (
        "llama4_text",
        {
            "max_position_embeddings": 1048576,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "num_local_experts": 128,
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
        },
    ),
    "smollm3-3b": (
        "smollm3",
        {"max_position_embeddings": 65536, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
    ),
    "qwen1.5-moe-a2.7b": (
        "qwen2_moe",
        {"max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen3-next-80b-a3b": (
        "qwen3_next",
        {
            "max_position_embeddings": 262144,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
    ),
    "qwen3.5-9b": ("qwen3_5_text", QWEN3_5),
    "qwen3.5-35b-a3b": ("qwen3_5_moe_text", QWEN3_5),
    "glm-4.5-air": (
        "glm4_moe",
        {
            "head_dim": 128,
            "num_nextn_predict_layers": 0,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    ),
    "minimax-m2": (
        "minimax_m2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}},
    ),
    "olmoe-1b-7b": ("olmoe", {"intermediate_size": 1024}),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of_a_class_read_as_the_preset(name: str) -> None:
    family, release = DEFAULTS[name]
    config = transformers.AutoConfig.for_model(family, **release).to_dict()
    not_in_config = {"name", "family", "source", "ignored_keys"}
    assert Model.from_hf(config).model_dump(exclude=not_in_config) == PRESETS[name].model_dump(exclude=not_in_config)


def test_text_config_reads_as_the_language_model() -> None:
    text = transformers.AutoConfig.for_model("qwen3_5_text", **QWEN3_5).to_dict()
    found = Model.from_hf({"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": text, "vision_config": {}})
    assert found.parameters == PRESETS["qwen3.5-9b"].parameters - 248320 * 4096
    assert (found.ignored_keys, "the language model alone" in found.source) == (("vision_config",), True)


@pytest.mark.quick_cases(every=5)
@pytest.mark.parametrize("name", PRESETS)
def test_a_layout_of_each_is_costed(name: str) -> None:
    found = estimate(make_job(name, "8xh100", seq=1024, batch=64), Layout(dp=8, zero=3, gas=8))
    assert found.step_time_s > 0
    states = PRESETS[name].parameters * 12 / 8 / 2**30
    assert found.peak_gib > states


LAST_OF_MODEL_TYPE = {family_of(model): name for name, model in PRESETS.items()}


@pytest.mark.quick_cases("granite-3.0-3b-a800m", "minitron-4b")
@pytest.mark.parametrize("name", LAST_OF_MODEL_TYPE.values())
def test_each_family_has_a_plan(name: str) -> None:
    assert plan(make_job(name, "512xh100", seq=1024, batch=1024, framework="ultrascale"), top=1).plans
