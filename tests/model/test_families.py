"""Families of transformers: small models with random configs have the same loss and gradients here and there, both ways."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from ultrascale.model.hf import stored
from ultrascale.model.hf_folder import HFFolder, write
from ultrascale.model.transformer import Transformer
from ultrascale.specs.hf_families import FAMILIES

VOCAB, LENGTH = 99, 24
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALL_HEADS = {**SHAPE, "num_key_value_heads": 4}
MLA: dict[str, Any] = {
    **ALL_HEADS,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 0.7}
QWEN_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
LINEAR: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
LLAMA4: dict[str, Any] = {
    **SHAPE,
    "head_dim": 16,
    "intermediate_size_mlp": 40,
    "num_local_experts": 6,
    "attention_chunk_size": 6,
    "floor_scale": 3,
    "attn_scale": 0.5,
}
GRANITE = {"embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2}
GEMMA: dict[str, Any] = {**SHAPE, "head_dim": 16}
HYBRID: dict[str, Any] = {
    **{key: value for key, value in SHAPE.items() if key != "num_hidden_layers"},
    "head_dim": 12,
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "n_groups": 3,
    "ssm_state_size": 7,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**SHAPE, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {**SHAPE, "sliding_window": 5, "head_dim": 12}),
    "qwen2": ("qwen2", {**SHAPE, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "qwen3": ("qwen3", {**SHAPE, "head_dim": 24}),
    "gpt2": (
        "gpt2",
        {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB, "initializer_range": 0.2},
    ),
    "mixtral": ("mixtral", {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2_moe", {**SHAPE, **QWEN_EXPERTS, "shared_expert_intermediate_size": 20, "mlp_only_layers": [0]}),
    "qwen3_moe": ("qwen3_moe", {**SHAPE, **QWEN_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "smollm3": ("smollm3", {**SHAPE, "no_rope_layer_interval": 3}),
    "smollm3 with windows": ("smollm3", {**SHAPE, "use_sliding_window": True, "sliding_window": 7}),
    "ministral": (
        "ministral",
        {**SHAPE, "head_dim": 12, "sliding_window": 6, "layer_types": ["full_attention", *["sliding_attention"] * 3]},
    ),
    "gemma": ("gemma", GEMMA),
    "gemma2": ("gemma2", {**GEMMA, "query_pre_attn_scalar": 24, "sliding_window": 6}),
    "gemma3_text": ("gemma3_text", {**GEMMA, "query_pre_attn_scalar": 16, "sliding_window": 6, "sliding_window_pattern": 3}),
    "gemma3_text scaled": (
        "gemma3_text",
        {
            **GEMMA,
            "sliding_window": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
            },
        },
    ),
    "phi3": ("phi3", {**SHAPE, "sliding_window": 7}),
    "phi3 partly rotated": (
        "phi3",
        {**SHAPE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "olmo2": ("olmo2", SHAPE),
    "olmo3": ("olmo3", {**SHAPE, "sliding_window": 6}),
    "olmo3 with yarn": (
        "olmo3",
        {
            **SHAPE,
            "sliding_window": 6,
            "max_position_embeddings": 64,
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 500_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
            },
        },
    ),
    "olmoe": ("olmoe", {**SHAPE, "num_experts": 8, "num_experts_per_tok": 3}),
    "granite": ("granite", {**SHAPE, **GRANITE, "attention_bias": True}),
    "granitemoe": ("granitemoe", {**SHAPE, **GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm": ("glm", {**SHAPE, "head_dim": 8}),
    "glm4": ("glm4", {**SHAPE, "head_dim": 16, "attention_bias": False}),
    "glm4_moe": (
        "glm4_moe",
        {
            **SHAPE,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "use_qk_norm": True,
            "head_dim": 16,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v2": ("deepseek_v2", {**MLA, "q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy"}),
    "deepseek_v2 in groups": (
        "deepseek_v2",
        {**MLA, "q_lora_rank": 20, "n_shared_experts": 1, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3": ("deepseek_v3", {**MLA, "q_lora_rank": 20, "n_group": 4, "topk_group": 2, "attention_bias": True}),
    "deepseek_v3 with yarn": (
        "deepseek_v3",
        {**MLA, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "max_position_embeddings": 64, "rope_parameters": YARN},
    ),
    "starcoder2": ("starcoder2", {**SHAPE, "sliding_window": 7}),
    "gpt_neox": (
        "gpt_neox",
        {**ALL_HEADS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "gpt_neox, one after the other": ("gpt_neox", {**ALL_HEADS, "use_parallel_residual": False, "attention_bias": False}),
    "stablelm": ("stablelm", {**SHAPE, "use_qkv_bias": True}),
    "stablelm, parallel": ("stablelm", {**SHAPE, "use_parallel_residual": True}),
    "cohere": ("cohere", {**SHAPE, "logit_scale": 0.5}),
    "cohere2": ("cohere2", {**SHAPE, "sliding_window": 6, "logit_scale": 0.25}),
    "nemotron": ("nemotron", SHAPE),
    "arcee": ("arcee", SHAPE),
    "seed_oss": ("seed_oss", {**SHAPE, "head_dim": 12, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "ernie4_5": ("ernie4_5", {**SHAPE, "head_dim": 8, "use_bias": True}),
    "exaone4": ("exaone4", {**SHAPE, "sliding_window": 6}),
    "exaone4, all full": ("exaone4", {**SHAPE, "sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "exaone4, all full, not rotated": ("exaone4", {**SHAPE, "layer_types": ["full_attention"] * 4}),
    "gpt_oss": (
        "gpt_oss",
        {
            **SHAPE,
            "head_dim": 12,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "swiglu_limit": 0.6,
            "sliding_window": 6,
            "rope_parameters": {**YARN, "rope_theta": 150_000.0, "truncate": False},
        },
    ),
    "gpt_oss, all full": (
        "gpt_oss",
        {
            **SHAPE,
            "head_dim": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "attention_bias": False,
            "layer_types": ["full_attention"] * 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {**SHAPE, **QWEN_EXPERTS, **LINEAR, "shared_expert_intermediate_size": 20},
    ),
    "qwen3_5": ("qwen3_5_text", {**SHAPE, **LINEAR}),
    "qwen3_5 with experts": (
        "qwen3_5_moe_text",
        {
            **SHAPE,
            **QWEN_EXPERTS,
            **LINEAR,
            "shared_expert_intermediate_size": 20,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "qwen3_next, layers given": (
        "qwen3_next",
        {
            **SHAPE,
            **QWEN_EXPERTS,
            "head_dim": 16,
            "shared_expert_intermediate_size": 20,
            "norm_topk_prob": False,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "nemotron_h": ("nemotron_h", {**HYBRID, "hybrid_override_pattern": "M-M*-", "time_step_min": 0.3}),
    "nemotron_h, one group": (
        "nemotron_h",
        {
            **HYBRID,
            "hybrid_override_pattern": "M*-M",
            "n_groups": 1,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "mlp_bias": True,
        },
    ),
    "nemotron_h with experts": (
        "nemotron_h",
        {
            **HYBRID,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "moe_shared_expert_intermediate_size": 20,
            "routed_scaling_factor": 1.5,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            **LLAMA4,
            "interleave_moe_layer_step": 2,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "llama4, all experts": (
        "llama4_text",
        {**LLAMA4, "num_experts_per_tok": 2, "attention_chunk_size": 7, "use_qk_norm": False},
    ),
    "llama4, all rotated": (
        "llama4_text",
        {**LLAMA4, "no_rope_layers": [1, 1, 1, 1], "layer_types": ["full_attention"] * 4, "attention_bias": True},
    ),
    "llama4, all in chunks": (
        "llama4_text",
        {**LLAMA4, "no_rope_layers": [0, 1, 0, 1], "layer_types": ["chunked_attention"] * 4},
    ),
    "qwen3_moe, every second layer": (
        "qwen3_moe",
        {**SHAPE, **QWEN_EXPERTS, "head_dim": 16, "decoder_sparse_step": 2},
    ),
    "minimax_m2": (
        "minimax_m2",
        {**SHAPE, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
    ),
}
TOKENS = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))


def test_every_family_is_tested() -> None:
    assert {family for family, _ in CONFIGS.values()} | {"kimi_k2"} == set(FAMILIES)


def reference(name: str) -> transformers.PreTrainedModel:
    family, fields = CONFIGS[name]
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, **fields), attn_implementation="eager"
    ).eval()
    with torch.no_grad():  # biases and norms begin as zeros and ones, which would hide a mistake
        for one in (*model.parameters(), *(buffer for key, buffer in model.named_buffers() if "correction_bias" in key)):
            one.add_(0.1 * torch.randn_like(one))
    return model


def their_gradients(model: transformers.PreTrainedModel, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Their loss, and its gradients by the names of tensors in files."""
    logits = model(TOKENS[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="sum")
    loss.backward()
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for one, parameter in zip(gradients.parameters(), model.parameters(), strict=True):
            one.copy_(torch.zeros_like(one) if parameter.grad is None else parameter.grad)
    gradients.save_pretrained(folder)
    return loss.item(), load_file(folder / "model.safetensors")


@pytest.mark.quick_cases(every=2)
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = reference(name)
    theirs.save_pretrained(tmp_path / "theirs")
    folder = HFFolder.open(tmp_path / "theirs")
    ours = Transformer(folder.model)
    with torch.no_grad():
        for key, tensor in (*ours.named_parameters(), *ours.named_buffers()):
            tensor.copy_(folder.tensor(key))
    loss = ours(TOKENS[:, :-1], torch.arange(LENGTH), TOKENS[:, 1:])
    loss.backward()
    expected_loss, expected = their_gradients(theirs, tmp_path / "gradients")
    assert loss.item() == pytest.approx(expected_loss, rel=1e-5)
    found = {key: tensor.grad for key, tensor in ours.named_parameters()} | dict(ours.named_buffers())
    for one in stored(folder.model):
        if "correction_bias" in one.name:
            continue  # has no gradient
        gradient = replace(one, offset=0.0).joined([found[key] for key in one.ours])
        assert one.name in expected
        assert one.expert is not None or expected[one.name].abs().max() > 0, one.name
        torch.testing.assert_close(gradient, expected[one.name], rtol=1e-3, atol=2e-4 * float(expected[one.name].abs().max()))

    write(tmp_path / "ours", folder.model, folder.tensor, dtype="fp32")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    before.pop("lm_head.weight", None) if folder.model.tied_embeddings else None
    assert before.keys() == after.keys()
    assert all((before[key] - after[key]).abs().max() <= 1e-6 for key in before)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    with torch.no_grad():
        assert (back(TOKENS).logits - theirs(TOKENS).logits).abs().max() <= 1e-5
