"""The training program of engines that are libraries: a transformers model of the plan's shape, and what a batch is."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ultrascale.measure.foreign.request import CannotRehearseError, ForeignRequest


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CannotRehearseError(f"{message}: try -- --seq 4096 --mbs 1")


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """What no configuration of these engines says; request.arguments_of writes it."""
    parser = _Parser(add_help=False)
    for name in ("seq", "mbs", "gas"):
        parser.add_argument(f"--{name}", type=int, required=name == "seq", default=1)
    parser.add_argument("--gradients", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--recompute", choices=("none", "full"), default="none")
    return parser.parse_args(arguments)


def hugging_face_model(request: ForeignRequest) -> nn.Module:
    """Of model/config.json beside the engine's configuration, in fp32."""
    file = Path(request.program).with_name("model") / "config.json"
    if not file.is_file():
        raise CannotRehearseError(
            f"{file.parent.name}/{file.name} is missing beside {Path(request.program).name}: try llama-3.1-8b"
        )
    transformers: Any = importlib.import_module("transformers")
    if not request.on_gpu:  # where tensors have no values: it reads them, and a mask takes flash attention's place
        masks: Any = importlib.import_module("transformers.masking_utils")
        masks.find_packed_sequence_indices = lambda _: None
    shape = transformers.AutoConfig.from_pretrained(str(file.parent))
    shape.use_cache = False
    build = transformers.AutoModelForCausalLM.from_config
    with torch.device("cuda" if request.on_gpu else "cpu"):
        model: nn.Module = build(shape, dtype=torch.float32, attn_implementation="sdpa")
    return model.train()


def batches(request: ForeignRequest, rows: int, seq: int) -> Iterator[Tensor]:
    while True:
        yield torch.zeros(rows, seq, dtype=torch.int64, device="cuda" if request.on_gpu else "cpu")
