"""Multi-token prediction: against transformers, through a folder of theirs, and what each of its layers reads and predicts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from model.builders import initialize
from ultrascale.model.hf_folder import HFFolder, write
from ultrascale.model.multi_token import tokens_ahead
from ultrascale.model.transformer import IGNORE_INDEX, Transformer
from ultrascale.specs.errors import SpecError
from ultrascale.specs.model import Model

MODEL = Model(
    name="small",
    layers=2,
    hidden=32,
    heads=4,
    ffn=48,
    vocab=99,
    mla={"q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    moe={
        "experts": 8,
        "top_k": 2,
        "expert_ffn": 12,
        "shared_experts": 1,
        "dense_layers": 1,
        "router": "sigmoid",
        "router_bias": True,
    },
    mtp_depth=2,
)
TOKENS = torch.randint(0, MODEL.vocab, (2, 13), generator=torch.Generator().manual_seed(1))


def ours() -> Transformer:
    module = Transformer(MODEL)
    initialize(module, 1, MODEL)
    with torch.no_grad():  # norms begin as ones, which would hide a mistake
        for one in module.parameters():
            one.add_(0.1 * torch.randn(one.shape, generator=torch.Generator().manual_seed(one.numel())))
    return module


def written(module: Transformer, folder: Path) -> Path:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    write(folder, MODEL, tensors.__getitem__, dtype="fp32")
    return folder


def test_losses_and_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    module, inputs, targets = ours(), TOKENS[:, :-1], TOKENS[:, 1:]
    module.head.mtp_weight = 0.4  # type: ignore[union-attr]
    loss, further = module(inputs, torch.arange(12), targets, ahead=tokens_ahead(inputs, targets, 2))
    (loss + further).backward()

    main = transformers.AutoModelForCausalLM.from_pretrained(written(module, tmp_path / "hf"), attn_implementation="eager")
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[23]\."]  # theirs names the layers of published models
    theirs = MtpModel.from_pretrained(main)
    hidden = main.model(inputs).last_hidden_state
    expected = F.cross_entropy(main.lm_head(hidden).flatten(0, 1), targets.flatten(), reduction="sum")
    losses = []
    for k in (1, 2):  # of the first 12 - k tokens: the others' are beyond the sequence
        length = inputs.shape[1] - k
        positions = torch.arange(k, k + length).unsqueeze(0)
        hidden = theirs.forward_layer(k - 1, hidden[:, :length], positions, None, input_ids=inputs[:, k:])
        losses.append(F.cross_entropy(main.lm_head(hidden).flatten(0, 1), targets[:, k:].flatten(), reduction="sum"))
    (expected + 0.4 * sum(losses)).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert further.item() == pytest.approx(0.4 * sum(one.item() for one in losses), rel=1e-5)

    found = dict(module.named_parameters())
    pairs = {
        "embed.tokens.weight": main.model.embed_tokens,
        "head.linear.weight": main.lm_head,
        "head.norm.weight": main.model.norm,
    }
    for k, layer in enumerate(theirs.layers):
        of_layer = {
            "embedding_norm": layer.enorm,
            "hidden_norm": layer.hnorm,
            "projection": layer.eh_proj,
            "final_norm": layer.post_norm,
            "attention.out": layer.mtp_block.self_attn.o_proj,
            "mlp.router": layer.mtp_block.mlp.gate,
        }
        pairs |= {f"blocks.{2 + k}.{name}.weight": one for name, one in of_layer.items()}
    for name, one in pairs.items():
        wanted = one.weight.grad
        assert wanted.abs().max() > 0, name
        torch.testing.assert_close(found[name].grad, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


def test_a_folder_is_read_back_with_and_without_copies_and_layers(tmp_path: Path) -> None:
    module = ours()
    file = written(module, tmp_path / "hf") / "model.safetensors"
    tensors = load_file(file)
    copies = {f"model.layers.{layer}.{name}.weight" for layer in (2, 3) for name in ("embed_tokens", "shared_head.head")}
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.kv_b_proj", "mlp.experts.7.up_proj")
    assert {*copies, *(f"model.layers.3.{name}.weight" for name in names)} <= tensors.keys()

    def reopened(kept: dict[str, torch.Tensor]) -> HFFolder:
        save_file(kept, file, metadata={"format": "pt"})
        return HFFolder.open(tmp_path / "hf")

    for folder in (HFFolder.open(tmp_path / "hf"), reopened({key: one for key, one in tensors.items() if key not in copies})):
        assert folder.model.mtp_depth == 2
        assert all(torch.equal(folder.tensor(name), one) for name, one in module.named_parameters())
    without = {key: one for key, one in tensors.items() if not key.startswith(("model.layers.2.", "model.layers.3."))}
    assert reopened(without).model.mtp_depth == 0  # as transformers saves a model that it has trained
    name = "model.layers.2.shared_head.head.weight"
    with pytest.raises(SpecError, match=r"differs from lm_head\.weight but the model has one for both"):
        reopened({**tensors, name: tensors[name] + 1})


def test_what_is_ahead_stays_in_the_sequence_and_in_its_document() -> None:
    tokens, targets = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[2, 3, 4, IGNORE_INDEX, 6]])
    one, two = tokens_ahead(tokens, targets, 2).unbind(2)
    assert one[0, :4].tolist() == [[2, 3], [3, 4], [4, IGNORE_INDEX], [5, 6]]
    assert two[0, :3].tolist() == [[3, 4], [4, IGNORE_INDEX], [5, 6]]
    assert one[0, 4:, 1].tolist() == [IGNORE_INDEX]
    assert two[0, 3:, 1].tolist() == [IGNORE_INDEX] * 2
    documents = torch.tensor([[0, 0, 1, 1, 1]])
    one, two = tokens_ahead(tokens, targets, 2, documents)[..., 1].unbind(2)
    assert one[0].tolist() == [3, IGNORE_INDEX, IGNORE_INDEX, 6, IGNORE_INDEX]
    assert two[0].tolist() == [IGNORE_INDEX, IGNORE_INDEX, 6, IGNORE_INDEX, IGNORE_INDEX]


def test_without_them_only_the_next_token_is_predicted() -> None:
    module, inputs, targets = ours(), TOKENS[:, :-1], TOKENS[:, 1:]
    with torch.no_grad():
        alone = module(inputs, torch.arange(12), targets)
        loss, _ = module(inputs, torch.arange(12), targets, ahead=tokens_ahead(inputs, targets, 2))
    assert alone.dim() == 0
    assert float(alone) == float(loss)
