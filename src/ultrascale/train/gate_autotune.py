"""Autotunes where a fused block computes its gates: between the GEMMs, or in their epilogues (kernels/gated_gemm.py).

Both are timed once for the job's shape, and the faster is used.
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

ROUNDS, TURN_MS = 5, 100.0  # long enough for the power limit to set the clock, as it does in training
SLACK = 1.02
"""how much slower gates within GEMMs may be: avoided memory traffic saves power, which gives the rest of a step a higher clock
(3b on an H200: 8.55 ms either way, and a step 1 % faster)"""


@dataclass(frozen=True)
class GateTimes:
    """Times of one layer's GEMMs with its gates, forward and backward."""

    between_ms: float | None
    within_ms: float | None
    failed: str = ""
    """the error of quack if it is installed but does not run here"""

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
    """Times both; None if there is no choice: no GPU, no fused block with GEMMs in bf16 or fp16, no quack."""
    dtype = COMPUTE.get(job.precision)
    if device.type != "cuda" or dtype is None or gated_gemm.why_not(dtype) or why_not_fused(job, layout, training):
        return None
    return timed(layout.mbs * job.seq, job.model.hidden, job.model.ffn, dtype, device)


def timed(tokens: int, hidden: int, ffn: int, dtype: torch.dtype, device: torch.device) -> GateTimes | None:
    """Times both for a shape; None if there is not enough memory."""
    try:
        with QUACK.raising():
            times = _times_ms(
                {"between": GatedMLPKernel(), "within": gated_gemm.GatedGemmKernel()}, tokens, hidden, ffn, dtype, device
            )
    except torch.OutOfMemoryError:
        return None
    except Exception as error:  # it has its own compiler, with errors of many classes: the run continues without it
        return GateTimes(None, None, one_line(error))
    finally:
        torch.cuda.empty_cache()
    return GateTimes(times["between"], times["within"])


def _times_ms(
    kernels: dict[str, GatedMLPKernel], tokens: int, hidden: int, ffn: int, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    x, grad, down = randn(tokens, hidden), randn(tokens, hidden), randn(hidden, ffn)
    gate_, up = randn(2 * ffn, hidden).chunk(2)

    def forward_and_backward(gates: GatedMLPKernel) -> None:
        both, _ = gates.forward(x, gate_, up)
        to_both, _ = gates.backward(grad, down, both)
        gates.to_input(to_both, gate_, up)
        gates.to_weights(to_both, x)

    graphs = {name: TimedGraph(partial(forward_and_backward, gates), device) for name, gates in kernels.items()}
    return in_turns_ms(graphs, ROUNDS, TURN_MS)
