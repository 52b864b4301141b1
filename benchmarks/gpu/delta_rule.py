"""Times the gated delta rule on a GPU in bf16, by operators of torch and by our kernels: python benchmarks/gpu/delta_rule.py"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from ultrascale.kernels.delta_rule import DeltaRuleKernels
from ultrascale.model.linear_attention import gated_delta_rule, recomputed

SHAPES = (  # sequences, tokens, key heads, value heads, width of each
    (1, 4096, 16, 32, 128),
    (2, 4096, 16, 32, 128),
    (8, 4096, 16, 32, 128),
    (16, 1024, 16, 32, 128),
    (1, 8192, 16, 32, 128),
    (4, 4096, 4, 8, 128),
    (8, 4096, 4, 8, 64),
    (1, 16384, 4, 8, 128),
)


def milliseconds(work: Callable[[], object], rounds: int = 4) -> float:
    work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / rounds * 1e3


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(
        "sequences  tokens  key heads  value heads  width |  operators: forward, backward ms |    kernels: forward, backward ms"
    )
    rules = partial(recomputed, gated_delta_rule), DeltaRuleKernels.apply
    for batch, tokens, key_heads, heads, width in SHAPES:
        counts = key_heads, key_heads, heads
        q, k, v = (torch.randn(batch, tokens, count, width, device="cuda", dtype=torch.bfloat16) for count in counts)
        decay, step = (torch.rand(batch, tokens, heads, device="cuda") for _ in range(2))
        inputs = [one.requires_grad_() for one in (q, k, v, -decay, step)]
        line = f"{batch:9d} {tokens:7d} {key_heads:10d} {heads:12d} {width:6d}"
        for rule in rules:
            out = rule(*inputs)
            backward = partial(torch.autograd.grad, out, inputs, torch.randn_like(out), retain_graph=True)
            line += f" | {milliseconds(partial(rule, *inputs)):21.2f} {milliseconds(backward):12.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
