"""The model of a row: its printed shape, completed by the family its name says and the parameter count it prints."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ultrascale.measure.accuracy.cells import UnmodelledRowError, number, whole
from ultrascale.specs.model import Model
from ultrascale.specs.validate import build

HYBRID = ("mamba", "nemotron_3", "nemotron-3-super", "nemotron-3-nano", "jamba", "zamba")
GATED_FAMILIES = ("llama", "qwen", "mistral", "mixtral", "deepseek", "smollm", "gemma", "moonlight", "olmo", "phi-3", "yi-")


def preset_of(name: str) -> Model | None:
    """`Qwen3_30B_a3B [tokendrop]` → qwen3-30b-a3b, `LLAMA3.1_405B` → llama-3.1-405b, `LLAMA2-7B SFT` → llama-2-7b."""
    base = re.sub(r"\[.*?\]|\(.*?\)", "", name.lower()).strip()
    base = re.sub(r"\b(sft|lora|finetune|pretrain|base|instruct)\b", "", base).strip()
    base = re.sub(r"[_\s]+", "-", base).strip("-")
    base = re.sub(r"^(meta-)?llama-?(\d)", r"llama-\2", base)
    base = re.sub(r"^deepseek-?v(\d)", r"deepseek-v\1", base)
    base = re.sub(r"^gpt-?3-", "gpt3-", base)
    for candidate in (base, base.replace(".0", ""), re.sub(r"-v\d+(\.\d+)?$", "", base)):
        if candidate in Model.preset_names():
            return Model.load(candidate)
    return None


def model_of(values: Mapping[str, str], assumptions: list[str]) -> Model:
    name = values.get("model", "")
    if "lora" in name.lower():
        raise UnmodelledRowError("LoRA: frozen weights have no gradients or states, which is not modelled")
    if any(word in name.lower() for word in HYBRID):
        raise UnmodelledRowError(f"model '{name}' is a hybrid with state-space layers, which are not modelled")
    if "single layer" in name.lower():
        raise UnmodelledRowError("one layer, not a training step")
    preset = preset_of(name)
    layers, hidden, heads = (whole(values, field) for field in ("layers", "hidden", "heads"))
    if preset is not None and (preset.moe is not None or layers is None or hidden is None):
        if layers is not None and layers != preset.layers:
            preset = build(Model, {**dict(preset), "layers": layers}, "model")
        return preset
    if layers is None or hidden is None:
        raise UnmodelledRowError(f"model '{name}' has no printed shape and is no preset")
    if whole(values, "ep") not in (None, 1):
        raise UnmodelledRowError(f"model '{name}' has experts whose shape is not printed and is no preset")
    if heads is None:
        heads = max(1, hidden // 128)
        assumptions.append(f"{heads} heads of 128")
    kv_heads = whole(values, "kv_heads")
    if kv_heads is None:
        kv_heads = heads
        assumptions.append(f"{kv_heads} kv heads, as many as heads")
    vocab = whole(values, "vocab")
    if vocab is None:
        vocab = preset.vocab if preset is not None else 51200
        assumptions.append(f"vocabulary of {vocab}")
    gated = any(family in name.lower() for family in GATED_FAMILIES)
    ffn = whole(values, "ffn")
    if ffn is None:
        ffn = 4 * hidden
        assumptions.append(f"ffn of {ffn}")
    fields = {
        "name": name,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "vocab": vocab,
    }
    if hidden % heads:
        fields["head_dim"] = 128
    variants = [_variant(fields, gated=gated, tied=tied) for tied in (False, True)]
    printed = number(values, "params_b")
    if printed:
        variants += [_variant(fields, gated=not gated, tied=tied) for tied in (False, True)]
        best = min(variants, key=lambda model: abs(model.parameters / 1e9 - printed))
        if abs(best.parameters / 1e9 / printed - 1) < 0.1:
            return best
    # GPT-era models tie the head; the Llama family does not, below 4B parameters excepted.
    return variants[0] if gated else variants[1]


def _variant(fields: dict[str, object], *, gated: bool, tied: bool) -> Model:
    style = {"activation": "swiglu", "norm": "rmsnorm"} if gated else {"activation": "gelu", "norm": "layernorm"}
    return build(Model, {**fields, **style, "tied_embeddings": tied}, "model")
