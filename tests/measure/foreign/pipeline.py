"""Layers in stages of a pipeline, which are built with shapes or without: arguments are schedule, micro-batches, `shapes`."""

import sys
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional

ROWS, WIDTH, VOCAB, LAYERS = 64, 32, 128, 2


def with_shapes(index: int, last: int) -> dict[str, tuple[torch.Tensor]]:
    states = torch.empty(ROWS, WIDTH, device="meta", requires_grad=True)
    tokens = torch.empty(ROWS, dtype=torch.int64, device="meta")
    logits = torch.empty(ROWS, VOCAB, device="meta", requires_grad=True)
    return {"input_args": (states if index else tokens,), "output_args": (logits if index == last else states,)}


def stage(index: int, last: int, shapes: bool) -> PipelineStage:
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    if index == 0:
        layers.insert(0, nn.Embedding(VOCAB, WIDTH))
    if index == last:
        layers.append(nn.Linear(WIDTH, VOCAB))
    given = with_shapes(index, last) if shapes else {}
    return PipelineStage(nn.Sequential(*layers), index, last + 1, torch.get_default_device(), **given)


def train(name: str, count: str, *shapes: str) -> None:
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    torch.set_default_device("cuda" if gpu else "cpu")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kind = getattr(schedules, f"Schedule{name}")
    several = issubclass(kind, schedules.PipelineScheduleMulti)
    last = ranks * (1 + several) - 1
    others = [last - rank if name in ("ZBVZeroBubble", "DualPipeV") else rank + ranks] if several else []
    stages = [stage(index, last, bool(shapes)) for index in (rank, *others)]
    schedule = kind(stages if several else stages[0], int(count), loss_fn=functional.cross_entropy)
    optimizer = torch.optim.AdamW(chain(*(one.submod.parameters() for one in stages)), foreach=False)
    for _ in range(3):
        tokens = torch.zeros(ROWS * int(count), dtype=torch.int64)
        target = {"target": tokens} if any(one.is_last for one in stages) else {}
        schedule.step(*([tokens] if rank == 0 else []), return_outputs=False, **target)
        optimizer.step()
        optimizer.zero_grad()


train(*sys.argv[1:])
