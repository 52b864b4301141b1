"""Megatron-Core's GPTModel of a shape and a layout with our weights, for `verify --engine megatron`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc1|linear_fc2)")
QKV, FC1 = "self_attention.linear_qkv", "mlp.linear_fc1"
_PARAMETERS = {
    "embedding.word_embeddings": "embed.tokens",
    "decoder.final_layernorm": "head.norm",
    "output_layer": "head.linear",
    "input_layernorm": "attention_norm",
    "self_attention.linear_proj": "attention.out",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc2": "mlp.down",
    "mlp.router": "mlp.router",
}


def virtual_stages(layout: Layout) -> int | None:
    return layout.virtual_stages if layout.pp > 1 and layout.virtual_stages > 1 else None


def sequence_parallel(layout: Layout) -> bool:
    return layout.tp > 1 and layout.sequence_parallel


class TorchNorm(nn.RMSNorm):
    """RMSNorm with the arguments of Megatron's norms."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def build(job: Job, layout: Layout, weights: Mapping[str, Tensor]) -> list[Any]:
    """The model's parts of this rank in DistributedDataParallel, with our weights."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    model = job.model
    moe = model.moe
    experts: dict[str, Any] = {} if moe is None else {
        "num_moe_experts": moe.experts,
        "moe_ffn_hidden_size": moe.expert_ffn,
        "moe_router_topk": moe.top_k,
        "moe_router_pre_softmax": not moe.renormalize,
        "moe_router_topk_scaling_factor": None if moe.scaling == 1.0 else moe.scaling,
        "moe_router_score_function": moe.router,
        "moe_router_enable_expert_bias": moe.router_bias,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": layout.dispatcher if layout.ep > 1 else "alltoall",
        "expert_model_parallel_size": layout.ep,
    }  # fmt: skip
    config = TransformerConfig(
        **experts,
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn if moe is None else moe.expert_ffn,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=virtual_stages(layout),
        sequence_parallel=sequence_parallel(layout),
        pipeline_dtype=torch.float32,
        batch_p2p_sync=False,
        # As Megatron-LM does: a batch of sends and receives between the same two ranks would match in the wrong order.
        overlap_p2p_comm=virtual_stages(layout) is not None,
        batch_p2p_comm=virtual_stages(layout) is None,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", num_experts=None if moe is None else moe.experts)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = TorchNorm
    stages = layout.pp * layout.virtual_stages
    parts = []
    for stage in range(layout.virtual_stages if layout.pp > 1 else 1):
        virtual = stage if virtual_stages(layout) else None
        part = GPTModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules([spec] * (model.layers // stages), layer_norm=TorchNorm),
            vocab_size=model.vocab,
            max_sequence_length=job.seq,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
            share_embeddings_and_output_weights=model.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=int(model.rope_theta),
            rope_scaling=model.rope_scaling is not None,
            rope_scaling_factor=1.0 if model.rope_scaling is None else model.rope_scaling.factor,
            vp_stage=virtual,
        )
        _number(part.decoder.layers, [layer.layer_number - 1 for layer in part.decoder.layers])
        for layer in part.decoder.layers if moe is not None else ():
            _number(layer.mlp.experts.local_experts, layer.mlp.local_expert_indices)
        for name, parameter in part.named_parameters():
            parameter.data.copy_(_shard(_joined(model, layout, name, weights), parameter))
        sharded = DistributedDataParallelConfig(use_distributed_optimizer=layout.zero > 0)
        parts.append(DistributedDataParallel(config, sharded, part))
    return parts


def _number(modules: nn.ModuleList, numbers: Sequence[int]) -> None:
    """Names layers and experts by their number in the whole model, as other programs do; Megatron starts at 0 on each rank."""
    found = list(modules)
    for place in range(len(found)):
        delattr(modules, str(place))
    for number, module in zip(numbers, found, strict=True):
        modules.add_module(str(number), module)


def _joined(model: Model, layout: Layout, name: str, weights: Mapping[str, Tensor]) -> Tensor:
    """The whole tensor of one of Megatron's parameters: queries, keys and values by group; gate and up of each rank."""
    module = name.removesuffix(".weight")
    if module == "output_layer" and model.tied_embeddings:  # the last stage's own copy
        module = "embedding.word_embeddings"
    if module in _PARAMETERS:
        return weights[f"{_PARAMETERS[module]}.weight"]
    _, _, layer, module = module.split(".", 3)
    block = f"blocks.{layer}."
    if module == QKV:
        parts = [weights[f"{block}attention.qkv.{one}.weight"] for one in "qkv"]
        return torch.cat([torch.unflatten(part, 0, (model.kv_heads, -1)) for part in parts], 1).flatten(0, 1)
    if (expert := EXPERT.fullmatch(module)) is not None:
        names = ("gate", "up") if expert[2] == "linear_fc1" else ("down",)
        parts = [weights[f"{block}mlp.experts.{one}"][int(expert[1])] for one in names]
        return parts[0] if len(parts) == 1 else _by_rank(layout, parts)
    if module == FC1:
        parts = [weights[f"{block}mlp.inputs.{one}.weight"] for one in ("gate", "up")]
        return _by_rank(layout, parts)
    return weights[f"{block}{_PARAMETERS[module]}.weight"]


def _by_rank(layout: Layout, parts: Sequence[Tensor]) -> Tensor:
    """Gate and up of each rank, one rank after the other."""
    return torch.cat([torch.unflatten(part, 0, (layout.tp, -1)) for part in parts], 1).flatten(0, 1)


def _shard(whole: Tensor, parameter: Any) -> Tensor:
    from megatron.core import parallel_state

    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    own: Tensor = whole.chunk(ranks, parameter.partition_dim)[parallel_state.get_tensor_model_parallel_rank()]
    return own
