"""Writer of adapters as the folder that Hugging Face's peft loads: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ultrascale.model.adapters import adapted
from ultrascale.model.hf import stored
from ultrascale.specs.errors import SpecError
from ultrascale.specs.folders import new_folder
from ultrascale.specs.model import Model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def _target(name: str, model: Model) -> str:
    """How the names of modules like this end, and of no others: routed experts have modules of the same names."""
    words = name.split(".")[:-2]
    return ".".join(words[-2:] if model.moe is not None else words[-1:])


def write(
    out: Path,
    model: Model,
    shapes: Mapping[str, tuple[int, ...]],
    tensor: Callable[[str], Tensor],
    rank: int,
    alpha: float,
) -> None:
    """`shapes` and `tensor`: of the adapters' matrices, by our names."""
    from safetensors.torch import save_file

    pairs, named = adapted(shapes), dict[str, Tensor]()
    for one in stored(model):
        if not any(ours in pairs for ours in one.ours):
            continue
        if len(one.ours) > 1 or one.transposed:
            raise SpecError(
                f"{one.name} of this family joins or transposes what adapters stand beside, which peft writes otherwise: "
                "merge them, ultrascale convert RUN hf FOLDER"
            )
        down, up = map(tensor, pairs[one.ours[0]])
        module = f"base_model.model.{one.name.removesuffix('.weight')}"
        named[f"{module}.lora_A.weight"] = down.contiguous()
        named[f"{module}.lora_B.weight"] = one.joined([up]).contiguous()  # in the order of the weight's rows
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({_target(name, model) for name in named}),
    }
    with new_folder(out) as folder:
        save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
