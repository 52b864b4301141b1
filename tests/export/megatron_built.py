"""Megatron-Core's GPTModel from the arguments of an exported run.sh, on a machine without GPUs.

Megatron-LM turns its arguments into a TransformerConfig in megatron/training, which no package has; the few lines here do it
for the arguments that `export` writes. Its fused kernels are off, as they need a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import TransformerConfig
from torch import distributed as dist

_UNFUSED = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "cross_entropy_loss_fusion",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
)
_RENAMED = {"--norm-epsilon": "layernorm_epsilon", "--num-experts": "num_moe_experts", "--swiglu": "gated_linear_unit"}
# Where ranks and their numbers are, and what Megatron-LM reads from its own file of arguments.
_ELSEWHERE = ("attention_backend", "bf16", "fp16", "recompute_granularity", "moe_layer_freq", "moe_grouped_gemm", "fp8_recipe")


@contextmanager
def one_rank(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world of one, in which the calls for a GPU that Megatron-Core makes unasked find none to need."""
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))  # the rotary table is moved there
    patch.setattr(torch.cuda, "Stream", lambda: None)  # experts have one, for copies
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)  # the other kind reads the GPU's state
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def config(given: dict[str, Any]) -> TransformerConfig:
    fields = {_RENAMED.get(key, key[2:].replace("-", "_")): number(value) for key, value in given.items()}
    known = {name: value for name, value in fields.items() if name in TransformerConfig.__dataclass_fields__}
    for name in _ELSEWHERE:
        known.pop(name, None)
    known |= dict.fromkeys(_UNFUSED, False)
    known["add_bias_linear"] = "--disable-bias-linear" not in given
    known["use_cpu_initialization"] = True
    if "--swiglu" in given:
        known["activation_func"] = torch.nn.functional.silu
    return TransformerConfig(**known)


def model(given: dict[str, Any]) -> GPTModel:
    shape, normalization = config(given), given["--normalization"]
    if shape.num_moe_experts:
        layers = get_gpt_decoder_block_spec(shape, use_transformer_engine=False, normalization=normalization)
    else:
        layers = get_gpt_layer_local_spec(normalization=normalization, qk_layernorm=shape.qk_layernorm)
    return GPTModel(
        shape,
        layers,
        vocab_size=int(given["--vocab-size"]) + 1,  # the stand-in tokenizer adds an end of document
        max_sequence_length=int(given["--max-position-embeddings"]),
        position_embedding_type=given["--position-embedding-type"],
        rotary_base=int(given.get("--rotary-base", 10000)),
        share_embeddings_and_output_weights="--untie-embeddings-and-output-weights" not in given,
    )


def number(value: Any) -> Any:
    """An argument's text as the number that it is, where it is one."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
