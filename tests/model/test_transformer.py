"""The decoder: equal to transformers, exact counts, slices that compose, and what it keeps for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from builders import make_job
from model.builders import from_hf, initialize, to_hf
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.memory import activations
from ultrascale.model.rotary import tables
from ultrascale.model.self_attention import CausalAttention
from ultrascale.model.transformer import Block, CrossEntropy, Transformer
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.errors import SpecError
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.validate import build

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "vocab_size": 101,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 6}),
    "llama grouped, tied": ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "llama biases everywhere": ("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama 3 rope": ("llama", {"head_dim": 16, "rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "llama geglu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral window": ("mistral", {"num_key_value_heads": 2, "sliding_window": 7}),
    "mistral wide window": ("mistral", {"num_key_value_heads": 3, "sliding_window": 64}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2, "rope_theta": 1e6, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 12, "rope_theta": 1e6}),
    "gpt2": (
        "gpt2",
        {"n_layer": 3, "n_embd": 48, "n_head": 6, "n_positions": 64, "vocab_size": 101, "layer_norm_epsilon": 1e-4},
    ),
    "gpt2 untied": ("gpt2", {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 64, "tie_word_embeddings": False}),
}
TINY = {"name": "x", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 64, "max_positions": 64}


def variant(**fields: Any) -> Model:
    return build(Model, {**TINY, **fields}, "model")


VARIANTS = {
    "plain": variant(),
    "tied": variant(tied_embeddings=True),
    "biases": variant(qkv_bias=True, attention_output_bias=True, mlp_bias=True),
    "qk_norm": variant(qk_norm=True, head_dim=16),
    "gpt": variant(kv_heads=4, positions="learned", norm="layernorm", activation="gelu", tied_embeddings=True, mlp_bias=True),
    "relu, no positions": variant(activation="relu", positions="none", sliding_window=5),
    "geglu": variant(activation="geglu"),
    "experts": variant(moe={"experts": 4, "top_k": 2, "expert_ffn": 24, "dense_layers": 1}),
    "plain experts, shared and gated": variant(
        activation="relu", moe={"experts": 4, "top_k": 1, "expert_ffn": 24, "shared_experts": 1, "shared_gate": True}
    ),
}


def theirs(case: str) -> tuple[transformers.PreTrainedModel, Model]:
    """A small model of transformers with every parameter random, norms and biases too."""
    family, changes = CASES[case]
    fields = changes if family == "gpt2" else {**SHAPE, **changes}
    config = transformers.AutoConfig.for_model(family, **fields, attn_implementation="eager", bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in reference.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    return reference, Model.from_hf(config.to_dict())


def tokens_of(model: Model, length: int = 40, batch: int = 2) -> Tensor:
    return torch.randint(0, model.vocab, (batch, length), generator=torch.Generator().manual_seed(1))


def initialized(model: Model, **parts: Any) -> Transformer:
    module = Transformer(model, **parts)
    initialize(module, 0, model)
    return module


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str) -> None:
    reference, model = theirs(case)
    ours = Transformer(model)
    ours.load_state_dict(from_hf(reference.state_dict(), model))
    tokens = tokens_of(model)
    with torch.no_grad():
        difference = ours(tokens, torch.arange(40)) - reference(tokens).logits
    assert difference.abs().max() <= 1e-5


@pytest.mark.parametrize("case", ["llama grouped, tied", "mistral window", "qwen3", "gpt2"])
def test_gradients_equal_transformers(case: str) -> None:
    reference, model = theirs(case)
    reference, ours = reference.double(), Transformer(model).double()
    ours.load_state_dict(from_hf(reference.state_dict(), model))
    tokens = tokens_of(model)
    ours(tokens[:, :-1], torch.arange(39), tokens[:, 1:]).backward()
    logits = reference(tokens[:, :-1]).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    given = to_hf({name: parameter.grad for name, parameter in ours.named_parameters()}, model)
    assert given.keys() == wanted.keys()
    for name, grad in given.items():
        # transformers rounds rotary tables and norms through fp32 whatever the model's dtype is.
        torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_those_of_the_spec(name: str) -> None:
    model = VARIANTS[name]
    assert sum(parameter.numel() for parameter in Transformer(model).parameters()) == model.parameters


@pytest.mark.parametrize(
    "name", ["llama-3-8b", "qwen3-0.6b", "qwen2.5-7b", "gpt2", "mistral-7b", "mixtral-8x7b", "qwen3-30b-a3b"]
)
def test_presets_build_on_meta_with_their_exact_count(name: str) -> None:
    model = Model.load(name)
    with torch.device("meta"):
        module = Transformer(model)
    assert sum(parameter.numel() for parameter in module.parameters()) == model.parameters
    assert all(parameter.is_meta for parameter in module.parameters())


def test_parameter_names() -> None:
    names = dict(Transformer(VARIANTS["gpt"]).named_parameters()) | dict(Transformer(VARIANTS["qk_norm"]).named_parameters())
    assert {
        "embed.tokens.weight",
        "embed.positions.weight",
        "blocks.1.attention_norm.weight",
        "blocks.1.attention.qkv.q.weight",
        "blocks.1.attention.q_norm.weight",
        "blocks.1.attention.out.weight",
        "blocks.1.mlp.inputs.gate.weight",
        "blocks.1.mlp.down.weight",
        "head.norm.weight",
        "head.linear.weight",
    } <= set(names)


@pytest.mark.parametrize("name", VARIANTS)
def test_stages_compose_to_the_whole_model(name: str) -> None:
    model = VARIANTS[name]
    tokens, positions = tokens_of(model, 12), torch.arange(12)
    first = initialized(model, layers=range(1), head=False)
    middle = initialized(model, layers=range(1, 2), embed=False, head=False)
    last = initialized(model, layers=range(2, 2), embed=False)
    assert list(middle.blocks) == ["1"]
    assert not last.blocks
    hidden = middle(first(tokens, positions), positions)
    whole = initialized(model)
    assert torch.equal(last(hidden, positions), whole(tokens, positions))
    assert torch.equal(last(hidden, positions, tokens), whole(tokens, positions, tokens))


def test_tied_ends_share_one_parameter_also_after_leaving_meta() -> None:
    with torch.device("meta"):
        module = Transformer(VARIANTS["tied"])
    module.to_empty(device="cpu")
    assert module.head is not None
    assert module.embed is not None
    assert module.head.linear.weight is module.embed.tokens.weight
    head_only = dict(Transformer(VARIANTS["tied"], embed=False).named_parameters())
    assert "head.linear.weight" in head_only


def test_the_loss_is_a_sum_over_targets_that_count() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[1, -100, 2], [-100, -100, 4]])
    rows = logits.log_softmax(-1)
    expected = -(rows[0, 0, 1] + rows[0, 2, 2] + rows[1, 2, 4])
    torch.testing.assert_close(CrossEntropy()(logits, targets), expected)
    assert CrossEntropy()(logits.bfloat16(), targets).dtype == torch.float32


def test_a_sliding_window_masks_older_tokens() -> None:
    q, k, v = (torch.randn(1, 9, heads, 8) for heads in (4, 2, 2))
    out = CausalAttention(3)(q, k, v)
    changed = k.clone()
    changed[:, :4] += 1.0
    assert torch.equal(CausalAttention(3)(q, changed, v)[:, 6:], out[:, 6:])
    assert not torch.allclose(CausalAttention(3)(q, changed, v)[:, 5], out[:, 5])
    torch.testing.assert_close(CausalAttention(9)(q, k, v), CausalAttention()(q, k, v))


@pytest.mark.parametrize("name", VARIANTS)
def test_checkpointing_changes_no_gradient(name: str) -> None:
    model = VARIANTS[name]
    module, tokens = initialized(model), tokens_of(model, 12)
    module(tokens, torch.arange(12), tokens).backward()
    wanted = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    for block in module.blocks.values():
        forward = block.forward
        block.forward = lambda *inputs, forward=forward: checkpoint(forward, *inputs, use_reentrant=False)
    module(tokens, torch.arange(12), tokens).backward()
    for parameter, grad in zip(module.parameters(), wanted, strict=True):
        assert grad is not None
        assert torch.equal(parameter.grad, grad)


def test_half_precision_keeps_its_dtype() -> None:
    for name in ("plain", "gpt"):
        module = initialized(VARIANTS[name]).bfloat16()
        logits = module(tokens_of(VARIANTS[name], 4, 1), torch.arange(4))
        assert logits.dtype == torch.bfloat16
        logits.sum().backward()


def test_odd_heads_cannot_rotate() -> None:
    with pytest.raises(SpecError, match=r"model\.head_dim is 7 but rotary .* try 8"):
        Transformer(variant(head_dim=7))


def saved_bytes(model: Model, length: int, batch: int = 1) -> int:
    """Distinct storages that one block's forward keeps, parameters and the shared rotary tables left out."""
    block = Block(model, 0)
    x = torch.randn(batch, length, model.hidden, requires_grad=True)
    rope = tables(model, torch.arange(length)) if model.positions == "rotary" else None
    known = {tensor.untyped_storage().data_ptr() for tensor in [*block.parameters(), *(rope or ())]}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(x, rope)
    assert out.requires_grad
    return sum(size for address, size in kept.items() if address not in known)


@pytest.mark.parametrize(
    "change", [{}, {"activation": "geglu"}, {"activation": "geglu_exact"}, {"norm": "layernorm", "activation": "gelu"}]
)
def test_a_block_saves_what_the_memory_model_counts(change: dict[str, Any]) -> None:
    model, length = Model.load("tiny").model_copy(update=change), 256
    job = make_job(model, "1xh100", length, 1, precision="fp32")
    law = activations.layer(job, LayoutColumns.of([Layout()]), LayerKind()).total[0]
    # Each of the two norms keeps a scale, LayerNorm a mean too, per token: a share of 1/hidden that the law leaves out.
    rows = 4 * length * (4 if model.norm == "layernorm" else 2)
    assert saved_bytes(model, length) == law + rows
