"""Where a fused block's gates are computed: between products, or by them (kernels/gated_gemm.py).

Both are timed, once, for the job's own shape, and the faster is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ultrascale.kernels import gated_gemm
from ultrascale.kernels.fused import FusedBlock, GatedMLPKernel
from ultrascale.kernels.optional_kernels import QUACK, one_line
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training
from ultrascale.train.build import COMPUTE
from ultrascale.train.kernels import why_not_fused
from ultrascale.train.timing import TimedGraph, in_turns_ms

ROUNDS, TURN_MS = 5, 100.0  # for as long as it takes until a card's power limit sets the clock, as it does in training
SLACK = 1.02
"""how much longer they may take within products: what is not moved through memory costs no power, which a step turns into a
higher clock (3b on an H200: 8.55 ms either way, and a step 1 % faster)"""


@dataclass(frozen=True)
class GateTimes:
    """One layer's products around its gates, forward and backward."""

    between_ms: float | None
    within_ms: float | None
    failed: str = ""
    """what quack said, where it is installed and does not run here"""

    def __str__(self) -> str:
        if self.within_ms is None or self.between_ms is None:
            return f"gates: between products; quack's kernels do not run here: {self.failed}"
        return f"gates: within products {self.within_ms:.2f} ms, between them {self.between_ms:.2f} ms"

    def apply(self, models: Iterable[nn.Module]) -> None:
        if self.within_ms is None or self.between_ms is None or self.within_ms > SLACK * self.between_ms:
            return
        for block in (module for model in models for module in model.modules() if isinstance(module, FusedBlock)):
            block.gates = gated_gemm.GatedGemmKernel()


def fastest(job: Job, layout: Layout, training: Training, device: torch.device) -> GateTimes | None:
    """None where there is nothing to choose: no GPU, no fused block with products in bf16 or fp16, no quack."""
    dtype = COMPUTE.get(job.precision)
    if device.type != "cuda" or dtype is None or gated_gemm.why_not(dtype) or why_not_fused(job, layout, training):
        return None
    return timed(layout.mbs * job.seq, job.model.hidden, job.model.ffn, dtype, device)


def timed(tokens: int, hidden: int, ffn: int, dtype: torch.dtype, device: torch.device) -> GateTimes | None:
    """None: there is no memory for such products."""
    try:
        with QUACK.raising():
            times = _times_ms(
                {"between": GatedMLPKernel(), "within": gated_gemm.GatedGemmKernel()}, tokens, hidden, ffn, dtype, device
            )
    except torch.OutOfMemoryError:
        return None
    except Exception as error:  # a compiler of its own, whose errors are of many kinds: a run does without it
        return GateTimes(None, None, one_line(error))
    finally:
        torch.cuda.empty_cache()
    return GateTimes(times["between"], times["within"])


def _times_ms(
    ways: dict[str, GatedMLPKernel], tokens: int, hidden: int, ffn: int, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    x, grad, down = numbers(tokens, hidden), numbers(tokens, hidden), numbers(hidden, ffn)
    gate_, up = numbers(2 * ffn, hidden).chunk(2)

    def forward_and_backward(gates: GatedMLPKernel) -> None:
        both, _ = gates.forward(x, gate_, up)
        to_both, _ = gates.backward(grad, down, both)
        gates.to_input(to_both, gate_, up)
        gates.to_weights(to_both, x)

    recorded = {name: TimedGraph(partial(forward_and_backward, gates), device) for name, gates in ways.items()}
    return in_turns_ms(recorded, ROUNDS, TURN_MS)
