"""Run a transformers model as `accelerate launch` does: FSDP2 or DDP of Accelerate's own configuration."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ultrascale.measure.foreign.program import batches, hugging_face_model, parsed
from ultrascale.measure.foreign.request import CannotRehearseError, ForeignRequest
from ultrascale.measure.foreign.watcher import Watcher


def run(request: ForeignRequest, watcher: Watcher, note: Callable[[str], None]) -> None:
    """Its program: the YAML of `accelerate launch --config_file`, with model/config.json beside it."""
    given = parsed(request.arguments)
    os.environ.update(_environment(request.program))
    accelerator = importlib.import_module("accelerate").Accelerator(gradient_accumulation_steps=given.gas)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and given.gradients == "fp32" and plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32)
    model: Any = hugging_face_model(request)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for tokens in batches(request, given.mbs, given.seq):
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def _environment(config: str) -> dict[str, str]:
    """The variables by which `accelerate launch` tells a program its configuration."""
    launch: Any = importlib.import_module("accelerate.commands.launch")
    words = ["--config_file", config, "--main_process_ip", "localhost", "--main_process_port", "0", "train.py"]
    found, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    for axis in ("tp", "cp"):
        size = getattr(found, f"parallelism_config_{axis}_size", 1)
        if found.use_parallelism_config and size > 1:
            raise CannotRehearseError(
                f"parallelism_config_{axis}_size is {size} but Accelerate is rehearsed with FSDP2 and DDP alone: try 1"
            )
    if found.use_fsdp and str(found.fsdp_offload_params).lower() == "true":
        raise CannotRehearseError("fsdp_offload_params is true, and a host's memory is not told from the GPU's here: try false")
    variables: dict[str, str] = launch.prepare_multi_gpu_env(found)
    return {name: value for name, value in variables.items() if os.environ.get(name) != value}
