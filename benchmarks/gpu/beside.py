"""Ours and torchtitan's training step on the same work and card: `python benchmarks/gpu/beside.py [--model 1b|3b]`.

Where torchtitan (0.2) is installed, its own model, compiler, loss, optimizer and clipping take the steps, as its trainer does
on one GPU: weights in fp32 under autocast to bf16, no recomputation. The engines take turns, each in a process of its own, so
that a card that grows warm slows both. Prints tokens/s and peak memory of each turn, and the ratios.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from step import MBS, MODELS, SEQ, WARM_UP, Numbers, machine, measure

from ultrascale import Model
from ultrascale.launch import local
from ultrascale.specs.units import GIB


@dataclass(frozen=True)
class Turn:
    engine: str
    step_ms: float
    tokens_per_s: float
    peak_gib: float
    gpu: str


def ours(name: str, mbs: int, steps: int) -> Turn:
    row, _, gpu = measure(name, mbs, "none", "all", Numbers(), steps, profiled=False)
    return Turn("ultrascale", row.step_ms, row.tokens_per_s, row.allocated_gib, gpu)


class TitanTrainer(NamedTuple):
    """torchtitan's own model, loss and optimizers."""

    model: Any
    loss: Callable[..., Any]
    optimizers: Any
    arguments: Any


def titan_config(seq: int, mbs: int, recompute: str = "none") -> Any:
    from torchtitan.config import JobConfig

    config = JobConfig()
    config.training.seq_len, config.training.local_batch_size = seq, mbs
    config.compile.enable = True
    config.activation_checkpoint.mode = recompute
    config.optimizer.implementation = "fused"
    return config


def titan_trainer(shape: Model, config: Any, dims: Any) -> TitanTrainer:
    """Parallelized, compiled and initialized as its trainer does it."""
    from torchtitan.models.llama3 import get_train_spec

    spec = get_train_spec()
    arguments = model_arguments(shape, config.training.seq_len, type(next(iter(spec.model_args.values()))))
    with torch.device("meta"):
        model = spec.model_cls(arguments)
    loss = spec.build_loss_fn(config, parallel_dims=dims)
    model = spec.parallelize_fn(model, dims, config)
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    return TitanTrainer(model, loss, spec.build_optimizers_fn([model], config.optimizer, dims), arguments)


def torchtitan(name: str, mbs: int, steps: int) -> Turn:
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as distributed

    config = titan_config(SEQ, mbs)
    alone = ParallelDims(dp_shard=1, dp_replicate=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    model, loss_of, optimizers, arguments = titan_trainer(MODELS[name], config, alone)
    autocast = distributed.maybe_enable_amp(alone, config.training.mixed_precision_param, "cuda")
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        tokens = torch.randint(0, arguments.vocab_size, (mbs, SEQ + 1), generator=generator).cuda()
        optimizers.zero_grad()
        with autocast:
            predicted = model(tokens[:, :-1])
            loss = loss_of(predicted, tokens[:, 1:]) / tokens[:, 1:].numel()
        del predicted
        loss.backward()
        distributed.clip_grad_norm_(list(model.parameters()), config.training.max_norm, foreach=True)
        optimizers.step()

    return timed("torchtitan", mbs * SEQ, steps, WARM_UP, step)


def timed(engine: str, tokens: int, steps: int, warm_up: int, step: Callable[[], object]) -> Turn:
    """The mean of some steps; `tokens` in each."""
    for _ in range(warm_up):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    each_s = (time.perf_counter() - start) / steps
    peak = torch.cuda.max_memory_allocated() / GIB
    return Turn(engine, each_s * 1e3, tokens / each_s, peak, torch.cuda.get_device_name())


def model_arguments(model: Model, seq: int, kind: Callable[..., Any]) -> Any:
    """torchtitan writes a layer's width as a multiple of two thirds of four times the hidden size, rounded up."""
    multiplier = model.ffn / int(8 * model.hidden / 3)
    return kind(
        dim=model.hidden, n_layers=model.layers, n_heads=model.heads, n_kv_heads=model.kv_heads, vocab_size=model.vocab,
        multiple_of=256, ffn_dim_multiplier=multiplier, rope_theta=model.rope_theta, max_seq_len=seq,
    )  # fmt: skip


def in_own_process(engine: str, name: str, mbs: int, steps: int) -> Turn:
    def rank(_: int, __: int, ___: str) -> Turn:
        return {"ultrascale": ours, "torchtitan": torchtitan}[engine](name, mbs, steps)

    (turn,) = local.run(rank, 1, timeout_s=600)
    return turn  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("1b", "3b"), default="1b")
    parser.add_argument("--mbs", type=int, help="sequences in a micro-batch; default 8 for 1b, 4 for 3b")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    if importlib.util.find_spec("torchtitan") is None:
        sys.exit("torchtitan is not installed: try `pip install torchtitan==0.2.2`, or benchmarks/gpu/step.py for ours alone")
    mbs = options.mbs or MBS[options.model]
    turns = [
        in_own_process(engine, options.model, mbs, options.steps)
        for _ in range(options.turns)
        for engine in ("torchtitan", "ultrascale")
    ]
    version = importlib.metadata.version("torchtitan")
    table = Table(title=f"{options.model}, micro-batch {mbs} · torchtitan {version} · {machine(turns[0].gpu)}")
    for heading in ("engine", "step ms", "tokens/s", "peak GiB"):
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    for turn in turns:
        table.add_row(turn.engine, f"{turn.step_ms:.1f}", f"{turn.tokens_per_s:,.0f}", f"{turn.peak_gib:.2f}")
    Console(width=128).print(table)
    speed, memory = (
        {engine: statistics.mean(getattr(turn, field) for turn in turns if turn.engine == engine) for engine in _names(turns)}
        for field in ("tokens_per_s", "peak_gib")
    )
    print(f"tokens/s: {speed['ultrascale'] / speed['torchtitan']:.3f} × torchtitan's")
    print(f"peak memory: {memory['ultrascale'] / memory['torchtitan']:.3f} × torchtitan's")


def _names(turns: list[Turn]) -> set[str]:
    return {turn.engine for turn in turns}


if __name__ == "__main__":
    main()
