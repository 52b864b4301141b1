"""Run under torchrun: DeepSpeed trains the model of each exported folder for three steps and answers in JSON, a line a folder.

Two things are as they must be where there is neither a GPU nor a compiler: torch's AdamW in place of DeepSpeed's own, which
would be compiled on the spot, and gloo alone in place of its kernel for shared memory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

STEPS, SEQUENCE = 3, 32
RATES = {"AdamW": 3e-3, "SGD": 0.3}  # large, so that three steps show


def settings(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "ds_config.json").read_text())
    optimizer = found["optimizer"]
    if optimizer["type"] == "AdamW":
        optimizer["params"]["torch_adam"] = True
    optimizer["params"]["lr"] = RATES[optimizer["type"]]
    return found


def trained(folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    given = settings(folder)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=given)
    tensor_ranks = given.get("tensor_parallel", {}).get("autotp_size", 1)
    seed = torch.Generator().manual_seed(dist.get_rank() // tensor_ranks)  # ranks of one tensor group read the same
    micro, each = engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()
    batches = torch.randint(0, model.config.vocab_size, (micro, each, SEQUENCE), generator=seed)
    losses = []
    for _ in range(STEPS):
        mean = torch.zeros(())
        for ids in batches:
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            mean += loss.detach().float() / micro
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    answer = {
        "optimizer": type(optimizer).__name__,
        "stage": engine.zero_optimization_stage(),
        "tensor_ranks": engine.autotp_size() or 1,
        "steps": engine.global_steps,
        "held": sum(parameter.numel() for parameter in engine.module.parameters()),
        "losses": losses,
    }
    engine.destroy()
    return answer


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
for name in sys.argv[1:]:
    found = trained(Path(name))
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
dist.destroy_process_group()
