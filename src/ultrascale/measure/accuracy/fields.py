"""What the cells of a row name: numbers and flags, the model, the GPU, the engine and the precision.

A blank cell means unknown; one that cannot be read raises with its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ultrascale.specs.errors import nearest
from ultrascale.specs.framework import Framework
from ultrascale.specs.gpu import GPU
from ultrascale.specs.model import Model
from ultrascale.specs.validate import build

# Engines that no run here names, by the preset that works as they do.
ALIKE = {
    r"megascale|primus|neox|internevo": "megatron-core",  # built on Megatron's layers, its communication, its optimizer
    r"maxtext|levanter|\bjax\b|\bxla\b|alpa": "torchtitan-0.2",  # one compiled program
    r"fsdp2|simplefsdp|olmo-core": "torchtitan-0.2-eager",
    r"fsdp": "fsdp1-eager",
    r"torchtune|pytorch|transformers|\beager\b": "eager",
}
USUAL_ADAPTER_RANK = 16
PRECISIONS = {"fp8": "fp8|float8", "bf16": "bf16|bfloat16", "fp16": "fp16|float16|half", "fp32": "fp32|float32|tf32"}
HYBRID = ("mamba", "nemotron_3", "nemotron-3-super", "nemotron-3-nano", "jamba", "zamba")
GATED_FAMILIES = ("llama", "qwen", "mistral", "mixtral", "deepseek", "smollm", "gemma", "moonlight", "olmo", "phi-3", "yi-")


class UnmodelledRowError(Exception):
    """Why a row cannot be modelled."""


def number(values: Mapping[str, str], name: str) -> float | None:
    text = values.get(name, "")
    if not text or text.lower() in ("nan", "none", "null", "-"):
        return None
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        raise UnmodelledRowError(f"{name} is '{text}', not a number") from None
    if not 0 <= value < 1e18:
        raise UnmodelledRowError(f"{name} is {text}: it must be a number that is not negative")
    return value


def whole(values: Mapping[str, str], name: str) -> int | None:
    value = number(values, name)
    if value is None:
        return None
    if value != int(value) or value < 1:
        raise UnmodelledRowError(f"{name} is {values[name]}: it must be a whole number of at least 1")
    return int(value)


def flag(values: Mapping[str, str], name: str) -> bool | None:
    """yes, true or 1; no, false or 0; anything else says nothing."""
    text = values.get(name, "").lower()
    return True if text in ("yes", "true", "1") else False if text in ("no", "false", "0") else None


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
    if "single layer" in name.lower():
        raise UnmodelledRowError("one layer, not a training step")
    preset = preset_of(name)
    if preset is None and any(word in name.lower() for word in HYBRID):
        raise UnmodelledRowError(f"model '{name}' is a hybrid with state-space layers and no preset")
    layers, hidden, heads = (whole(values, field) for field in ("layers", "hidden", "heads"))
    if preset is not None and (preset.moe is not None or layers is None or hidden is None):
        if layers is not None and layers != preset.layers:
            preset = build(Model, {**dict(preset), "layers": layers}, "model")
        return preset
    if layers is None or hidden is None:
        raise UnmodelledRowError(f"model '{name}' has no printed shape and is no preset")
    if whole(values, "ep") not in (None, 1):
        raise UnmodelledRowError(f"model '{name}' has experts whose shape is not printed and is no preset")

    def assumed(column: str, usual: int, words: str) -> int:
        found = whole(values, column)
        if found is None:
            assumptions.append(words.format(usual))
        return found or usual

    heads = assumed("heads", max(1, hidden // 128), "{} heads of 128")
    gated = any(family in name.lower() for family in GATED_FAMILIES)
    fields: dict[str, object] = {
        "name": name,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": assumed("kv_heads", heads, "{} kv heads, as many as heads"),
        "vocab": assumed("vocab", preset.vocab if preset is not None else 51200, "vocabulary of {}"),
        "ffn": assumed("ffn", 4 * hidden, "ffn of {}"),
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


def adapter_rank_of(values: Mapping[str, str], assumptions: list[str]) -> int | None:
    """LoRA's rank: the row's own, or where its model is called so that of NeMo's and Megatron-Bridge's recipes."""
    rank = whole(values, "adapter_rank")
    if rank is None and "lora" in values.get("model", "").lower():
        assumptions.append(f"LoRA of rank {USUAL_ADAPTER_RANK} on q, k, v")
        return USUAL_ADAPTER_RANK
    return rank


def offload_of(values: Mapping[str, str], assumptions: list[str]) -> str:
    """What lives on the host: `offload` names it, `activation_offload` is a flag, `cpu_offload_gb` only says how much."""
    owners = [values["offload"]] if values.get("offload", "none") not in ("", "none") else []
    if flag(values, "activation_offload"):
        owners.append("activations")
    elif not owners and number(values, "cpu_offload_gb"):
        assumptions.append(f"{values['cpu_offload_gb']} GB on the host are optimizer states")
        owners.append("optimizer")
    if len(set(owners)) > 1:
        raise UnmodelledRowError(f"offload of {owners[0]} and activations together is not modelled")
    return owners[0] if owners else "none"


def gpu_kind(text: str, assumptions: list[str]) -> GPU:
    """`H100-80GB (DGX)`, `A100-40GB`, `B200-SXM`, `MI300X`: the preset it names."""
    name = text.lower().replace("_", "-").replace(" ", "-")
    if "a100" in name:
        # The DGX A100 of 2020 had 40 GB parts; the 80 GB ones came a year later.
        size = "40" if "40g" in name or "2020" in name else "80"
        if "40g" not in name and "80g" not in name:
            assumptions.append(f"A100 with {size} GB")
        return GPU.load(f"a100-{size}")
    if "h100" in name:
        if "96g" in name:
            return GPU.load("h100-96")
        return GPU.load("h100-94" if "94g" in name or "nvl" in name else "h100-pcie" if "pcie" in name else "h100")
    known = [kind for kind in GPU.preset_names() if kind != "cpu" and re.search(rf"(?<![a-z\d]){kind}(?![a-z\d])", name)]
    if known:
        return GPU.load(max(known, key=len))
    raise UnmodelledRowError(f"gpu is '{text}', which is no known kind: {nearest(name, GPU.presets())}")


def framework_of(values: Mapping[str, str], assumptions: list[str]) -> Framework:
    """The engine by its name, its attention kernel and whether it was compiled."""
    system = values.get("system", "").lower()
    compiled, eager = flag(values, "compile") is True, flag(values, "compile") is False
    year = re.search(r"20(19|2[0-9])", system)
    if "megatron" in system or "nemo" in system:
        old = (year is not None and int(year[0]) <= 2022) or "ptd-p" in system
        name = "megatron-2021" if old else "megatron-no-overlap" if "no overlap" in system else "megatron-core"
    elif "torchtitan" in system:
        name = "torchtitan-0.2" if compiled else "torchtitan-0.2-eager"
        if not compiled and not eager:
            assumptions.append("not compiled")
    elif "flash-attn training" in system:
        name = "flash-training"
    elif "nanotron" in system:
        name = "nanotron"
    elif "hai-llm" in system:
        name = "hai-llm"
    elif "deepspeed" in system:
        # ZeRO of 2021 ran without flash attention and with one ring across nodes; what came after runs on today's kernels.
        modern = "flash" in values.get("attention_impl", "").lower() or bool(
            re.search(r"[hb]\d00|mi3", values.get("gpu", "").lower()) or re.search(r"deepspeed 0\.[1-9]\d", system)
        )
        name = "deepspeed" if modern else "deepspeed-2021"
    elif "fsdp1" in system or "composer" in system or "foundry" in system:
        name = "torchtitan-0.2" if compiled else "fsdp1-eager"
    else:
        alike = next((like for words, like in ALIKE.items() if re.search(words, system)), "unknown")
        name = "torchtitan-0.2" if compiled and alike.endswith(("eager", "unknown")) else alike
        assumptions.append(f"framework '{values.get('system', '')}' taken as {name}")
    framework = Framework.load(name)
    changes: dict[str, Any] = {column: values[column] for column in ("loss", "stage_split") if values.get(column)}
    if (fused := flag(values, "fused_loss")) is not None:
        changes.setdefault("loss", "fused" if fused else "log-softmax")
    if "megatron-bridge" in system:
        # cross_entropy_fusion_impl = "te" in every recipe: bf16 logits, and their gradient takes their place.
        changes.setdefault("loss", "overwritten")
    elif name == "megatron-core":
        changes.setdefault("loss", "in-place")
    kernel = attention_kernel(values.get("attention_impl", "").lower())
    if kernel == "flash" and framework.attention.startswith("plain"):
        kernel = "flash-2"  # an engine of plain attention's days that was given the kernel of its time
    if kernel is not None and not (kernel == "flash" and framework.attention.startswith("flash")):
        changes["attention"] = kernel
    if flag(values, "expert_overlap"):
        changes["expert_overlap"] = "microbatches"
    if framework.routing == "dropless":
        if "tokendrop" in values.get("model", "").lower():
            changes["routing"] = "capacity"
        elif flag(values, "cuda_graphs"):
            changes["routing"] = "graphed"
    if flag(values, "optimizer_in_backward"):
        changes["accumulation"] = "stepped"
    elif flag(values, "grad_accum_fusion") is False:
        changes["accumulation"] = "separate"
    if "all bf16" in values.get("precision", "").lower():
        changes["states"] = "pure"
    if "liger" in system:  # its norms and gates keep their inputs alone
        changes |= {"norm": "fused", "eager_activation": False}
    if eager and name == "torchtitan-0.2":
        changes["elementwise"] = 2.2
    return build(Framework, {**framework.model_dump(), **changes}, "framework")


def dispatcher_of(values: Mapping[str, str], assumptions: list[str]) -> str:
    """How tokens reach their experts: the row's own word, or by the release; else by NCCL's all-to-all."""
    if values.get("dispatcher"):
        return values["dispatcher"]
    release = re.search(r"megatron-bridge (?:20)?(\d\d)", values.get("system", "").lower())
    if release is None or int(release[1]) < 26 or values.get("ep", "") in ("", "1"):
        return "alltoall"
    assumptions.append("dispatcher hybridep")  # most recipes from 26.02 on; none before
    return "hybridep"


def prints_gigabytes(values: Mapping[str, str]) -> bool:
    """Megatron-Bridge logs allocated memory in 10^9 bytes (utils/train_utils.py, report_memory); its cards call them GiB."""
    return "megatron-bridge" in values.get("system", "").lower() and "allocated" in values.get("mem_kind", "").lower()


def attention_kernel(text: str) -> str | None:
    """The kernel that `attention_impl` names; None where it says nothing. torch's SDPA is FlashAttention-2."""
    if not text:
        return None
    if "unfused" in text or "plain" in text or "eager" in text:
        return "plain-fused" if "softmax fused" in text else "plain"
    if "flash" in text or "sdpa" in text:
        if re.search(r"\b(v|attn |attention |-)?1\b", text):
            return "flash-1"
        return "flash-2" if "sdpa" in text or re.search(r"2\b", text) else "flash"
    return "flash" if "te" in text or "cudnn" in text else None


def precision_of(values: Mapping[str, str], kind: GPU, assumptions: list[str]) -> str:
    text = values.get("precision", "").lower()
    if "fp4" in text:
        raise UnmodelledRowError(f"precision is {values['precision']}: 4-bit training is not modelled")
    name = next((name for name, words in PRECISIONS.items() if re.search(words, text)), None if text else "bf16")
    if name is None:
        raise UnmodelledRowError(f"precision is '{values['precision']}', which is not known: such as bf16, fp16, fp8 or fp32")
    if name == "bf16" and "bf16" not in kind.peak_tflops:
        name = "fp16"
    if name not in kind.peak_tflops:
        raise UnmodelledRowError(f"precision is {values['precision']} but {kind.name} has no {name}")
    if not text:
        assumptions.append("precision bf16")
    return name
