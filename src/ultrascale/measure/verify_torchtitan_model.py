"""torchtitan's model of a shape, for `verify --engine torchtitan`: its Llama, or its Qwen3 for experts and normalised heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ultrascale.specs.errors import SpecError
from ultrascale.specs.model import Model

ROUTER = {
    "shared_experts": 0,
    "groups": 1,
    "dense_layers": 0,
    "interval": 1,
    "scale_inputs": False,
}
"""what torchtitan's Qwen3 has of our MoE"""


def check_model(model: Model) -> None:
    """SpecError for what its Qwen3 has not."""
    if is_qwen3(model) and model.rope_scaling is not None:
        raise SpecError(
            "model.rope_scaling is set but --engine torchtitan scales no positions of its Qwen3: try null, or qwen3-30b-a3b"
        )
    if model.moe is not None and not model.qk_norm:
        raise SpecError(
            "model.qk_norm is false but --engine torchtitan runs the experts of its Qwen3, which normalises heads: try true, "
            "or qwen3-30b-a3b"
        )
    for name, value in ROUTER.items() if model.moe is not None else ():
        if getattr(model.moe, name) != value:
            raise SpecError(
                f"model.moe.{name} is {getattr(model.moe, name)} but --engine torchtitan runs the experts of its Qwen3: "
                f"try {name}: {value}, or qwen3-30b-a3b"
            )


def is_qwen3(model: Model) -> bool:
    return model.qk_norm or model.moe is not None


def named_alike(model: Model) -> Model:
    """Qwen3 of the same weights: a router's scores and bias have no weights that train."""
    if model.moe is None:
        return model
    return model.model_copy(
        update={"moe": model.moe.model_copy(update={"router": "softmax", "router_bias": False, "scaling": 1.0})}
    )


def adapter(model: Model) -> Any:
    """Between Hugging Face's names and torchtitan's."""
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    return (Qwen3StateDictAdapter if is_qwen3(model) else Llama3StateDictAdapter)(config_of(model, seq=2), None)


def parallelize_function(model: Model) -> Callable[..., Any]:
    from torchtitan.models.llama3.parallelize import parallelize_llama
    from torchtitan.models.qwen3.parallelize import parallelize_qwen3

    found: Callable[..., Any] = parallelize_qwen3 if is_qwen3(model) else parallelize_llama
    return found


def config_of(model: Model, seq: int) -> Any:
    """torchtitan's model of this shape."""
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
    from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock

    qwen3, scaling = is_qwen3(model), model.rope_scaling
    scaled = {} if scaling is None else {
        "scaling": "llama",
        "scaling_factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }  # fmt: skip
    rope = (CosSinRoPE if qwen3 else ComplexRoPE).Config(dim=model.head_dim, max_seq_len=seq, theta=model.rope_theta, **scaled)
    hidden: dict[str, Any] = {"normalized_shape": model.hidden, "eps": model.norm_eps}
    attention = {
        "dim": model.hidden,
        "n_heads": model.heads,
        "n_kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "wqkv_param_init": {},
        "wo_param_init": {},
        "fuse_qkv": True,
        "rope": rope,
    }
    ffn = {"dim": model.hidden, "hidden_dim": model.ffn, "w1_param_init": {}, "w2w3_param_init": {}}
    layers = [
        (Qwen3TransformerBlock if qwen3 else Llama3TransformerBlock).Config(
            attention_norm=RMSNorm.Config(**hidden),
            ffn_norm=RMSNorm.Config(**hidden),
            attention=make_gqa_config(
                **attention,
                inner_attention=FlexAttention.Config(),
                qk_norm=RMSNorm.Config(normalized_shape=model.head_dim, eps=model.norm_eps) if model.qk_norm else None,
            ),
            **({"feed_forward": make_ffn_config(**ffn)} if model.moe is None else {"moe": _experts(model)}),
        )
        for _ in range(model.layers)
    ]
    return (Qwen3Model if qwen3 else Llama3Model).Config(
        dim=model.hidden,
        vocab_size=model.vocab,
        tok_embeddings=Embedding.Config(num_embeddings=model.vocab, embedding_dim=model.hidden),
        norm=RMSNorm.Config(**hidden),
        lm_head=Linear.Config(in_features=model.hidden, out_features=model.vocab),
        layers=layers,
        enable_weight_tying=model.tied_embeddings,
    )


def _experts(model: Model) -> Any:
    from torchtitan.models.common.config_utils import make_moe_config, make_routed_experts_config, make_router_config

    moe = model.moe
    assert moe is not None
    return make_moe_config(
        num_experts=moe.experts,
        router=make_router_config(
            dim=model.hidden,
            num_experts=moe.experts,
            gate_param_init={},
            top_k=moe.top_k,
            score_func=moe.router,
            route_norm=moe.renormalize,
            route_scale=moe.scaling,
        ),
        routed_experts=make_routed_experts_config(
            dim=model.hidden,
            hidden_dim=moe.expert_ffn,
            num_experts=moe.experts,
            top_k=moe.top_k,
            param_init={},
            comm_backend="standard",
        ),
    )
