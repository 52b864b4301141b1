"""Run a transformers model in DeepSpeed's engine with its own configuration: ZeRO 1, 2 and 3."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ultrascale.measure.foreign.program import batches, hugging_face_model, parsed
from ultrascale.measure.foreign.request import CannotRehearseError, ForeignRequest
from ultrascale.measure.foreign.watcher import Watcher


def run(request: ForeignRequest, watcher: Watcher, note: Callable[[str], None]) -> None:
    """Its program: the JSON of deepspeed.initialize, with model/config.json beside it."""
    given = parsed(request.arguments)
    settings = json.loads(Path(request.program).read_text(encoding="utf-8"))
    _check(settings)
    os.environ["DS_ACCELERATOR"] = "cuda" if request.on_gpu else "cpu"
    deepspeed: Any = importlib.import_module("deepspeed")
    _without_peers()
    deepspeed.init_distributed("nccl" if request.on_gpu else "gloo")
    watcher.steps_by_hand = True  # its optimizer steps for each part of the parameters, and once to create its states
    model: Any = hugging_face_model(request)
    if given.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters())  # DeepSpeed's own is a CUDA kernel with the same states
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    for tokens in batches(request, given.mbs, given.seq):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        last = engine.is_gradient_accumulation_boundary()
        engine.step()
        if last:
            watcher.end_step()


def _check(settings: dict[str, Any]) -> None:
    for what in ("offload_optimizer", "offload_param"):
        if settings.get("zero_optimization", {}).get(what, {}).get("device", "none") != "none":
            raise CannotRehearseError(
                f"zero_optimization.{what} moves tensors to a host, whose memory is not told from the GPU's here: try none"
            )
    sizes = {
        "tensor_parallel.autotp_size": settings.get("tensor_parallel", {}).get("autotp_size", 1),
        "sequence_parallel_size": settings.get("sequence_parallel_size", 1),
    }
    for name, size in sizes.items():
        if size > 1:
            raise CannotRehearseError(f"{name} is {size} but DeepSpeed is rehearsed with ZeRO alone: try 1")


def _without_peers() -> None:
    """Without C++ for ranks that share memory, and without a comparison of all ranks' modules."""
    communication: Any = importlib.import_module("deepspeed.comm.torch")
    communication.build_shm_op = lambda: None
    order: Any = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
    order.assert_ints_same_as_other_ranks = lambda _: None
