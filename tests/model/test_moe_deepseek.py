"""DeepSeek's routers, which choose among groups of experts, beside those of `transformers`."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from ultrascale.model.moe import MixtureOfExperts, choose
from ultrascale.model.transformer import MLP
from ultrascale.specs.blocks import MoE
from ultrascale.specs.errors import SpecError
from ultrascale.specs.model import Model
from ultrascale.specs.validate import build

CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


def theirs(family: str, **changes: Any) -> tuple[nn.Module, Model]:
    """The MoE layer that transformers makes of a config, its weights random, and the Model that we make of it."""
    if family == "deepseek_v3":
        from transformers.models.deepseek_v3 import configuration_deepseek_v3 as configuration
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

        config, layer = configuration.DeepseekV3Config(**CONFIG, **changes), modeling.DeepseekV3MoE
    else:
        from transformers.models.deepseek_v2 import configuration_deepseek_v2 as configuration
        from transformers.models.deepseek_v2 import modeling_deepseek_v2 as modeling

        config, layer = configuration.DeepseekV2Config(**CONFIG, **changes), modeling.DeepseekV2Moe
    config._experts_implementation = "eager"
    torch.manual_seed(3)
    module = layer(config).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
        if family == "deepseek_v3":
            module.gate.e_score_correction_bias.copy_(torch.linspace(-0.6, 0.6, 16)[torch.randperm(16)])
    return module, Model.from_hf({"model_type": family, **CONFIG, **changes}, "small")


@torch.no_grad()
def ours(their: Any, model: Model) -> MixtureOfExperts:
    assert model.moe is not None
    layer = MixtureOfExperts(model, model.moe, MLP(model, model.moe.shared_expert_ffn)).double()
    layer.router.weight.copy_(their.gate.weight)
    if layer.router.bias is not None:
        layer.router.bias.copy_(their.gate.e_score_correction_bias)
    gate, up = their.experts.gate_up_proj.chunk(2, dim=1)
    for name, value in (("gate", gate), ("up", up), ("down", their.experts.down_proj)):
        layer.experts.get_parameter(name).copy_(value)
    assert isinstance(layer.shared, MLP)
    for name in ("gate", "up"):
        layer.shared.inputs.get_submodule(name).weight.copy_(getattr(their.shared_experts, f"{name}_proj").weight)
    layer.shared.down.weight.copy_(their.shared_experts.down_proj.weight)
    return layer


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v3", {"n_group": 4, "topk_group": 2}),
        ("deepseek_v3", {"n_group": 8, "topk_group": 3, "routed_scaling_factor": 1.7}),
        ("deepseek_v3", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0}),
        ("deepseek_v2", {"topk_method": "greedy"}),
    ],
)
def test_outputs_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    their, model = theirs(family, **changes)
    x = torch.randn(3, 11, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    found, wanted = ours(their, model)(x), their(x)
    # Their router scores in fp32, whatever the rest is in.
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_token_visits_the_best_groups_only() -> None:
    """Of four pairs, the second has the best two together, the last the best single expert."""
    scores = torch.tensor([0.30, 0.29, 0.80, 0.70, 0.10, 0.10, 0.90, 0.05])
    moe = MoE(experts=8, top_k=2, expert_ffn=4, router="sigmoid", groups=4, top_groups=1)
    assert choose(scores, moe).tolist() == [2, 3]
    assert choose(scores, moe.model_copy(update={"router": "softmax"})).tolist() == [6, 7]
    assert choose(scores, moe.model_copy(update={"groups": 1})).tolist() == [6, 2]


def test_published_values_of_v3() -> None:
    moe = Model.load("deepseek-v3").moe
    assert moe is not None
    assert (moe.groups, moe.top_groups, moe.scaling, moe.renormalize) == (8, 4, 2.5, True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"groups": 3}, "model.moe.groups is 3 but must divide experts = 8: try 2 or 4"),
        ({"groups": 2, "top_groups": 3}, "model.moe.top_groups is 3 but there are only groups = 2: try 2"),
        ({"groups": 8, "top_k": 2}, "model.moe.top_groups is 1 but its groups have 1 experts and top_k is 2: try 2"),
        ({"scaling": 0.0}, "model.moe.scaling"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, Any], message: str) -> None:
    moe = {"experts": 8, "top_k": 1, "expert_ffn": 4, **fields}
    with pytest.raises(SpecError, match=re.escape(message)):
        build(Model, {"name": "x", "layers": 1, "hidden": 16, "heads": 2, "vocab": 32, "ffn": 0, "moe": moe}, "model")
