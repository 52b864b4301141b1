"""Our kernels against what else does their work, in one run on this machine's GPU: forward and backward, time and numbers.

A contest is one kernel at one shape. Its contestants get the same numbers: plain operators one by one, torch.compile of them,
Liger-Kernel where it is installed, and ours. Who computes what stands in kernels_block.py, kernels_step.py and
kernels_attention.py; kernels_timed.py runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.model import Model

if TYPE_CHECKING:
    from torch import Tensor

WAYS = ("eager", "compile", "liger", "ours")
KERNELS = ("norm", "rotary", "gate", "loss", "adamw", "window", "documents")
SEQ = 4096


@dataclass(frozen=True)
class KernelShape:
    """What one GPU has of a model in a step."""

    model: Model
    mbs: int
    seq: int

    @property
    def tokens(self) -> int:
        return self.mbs * self.seq


@dataclass(frozen=True)
class KernelCandidate:
    run: Callable[[], tuple[Tensor, ...]]
    """forward and backward: outputs, then gradients"""
    reset: Callable[[], None] = lambda: None
    """puts back what a run overwrites; not timed"""
    result: Callable[[], tuple[Tensor, ...]] | None = None
    """what to compare, where it is not what `run` returns"""


@dataclass(frozen=True)
class KernelComparison:
    size: str
    ways: dict[str, Callable[[], KernelCandidate]]
    """in the order of WAYS; the first is what all are compared with"""
    moved: int = 0
    """bytes that ours reads and writes"""
    flops: float = 0.0
    """of matrix products, where they take the time"""
    missing: dict[str, str] = field(default_factory=dict)
    """ways that nobody goes, and why"""


@dataclass(frozen=True)
class KernelResult:
    kernel: str
    model: str
    size: str
    times_ms: dict[str, float]
    missing: dict[str, str]
    """ways without a time, and why"""
    differences: dict[str, float]
    """from the plain operators: the largest, over the largest number of that output or gradient"""
    extra_gib: dict[str, float]
    """most memory during a run, beyond what was there before"""
    gb_s: float | None
    tflops: float | None
    of_peak: float | None
    """of the GPU's bandwidth, or of its matrix rate; None: neither is known"""

    @property
    def share(self) -> float | None:
        """Of the time of the best other, what ours takes."""
        others = [ms for way, ms in self.times_ms.items() if way != "ours"]
        return self.times_ms["ours"] / min(others) if others and "ours" in self.times_ms else None

    @property
    def verdict(self) -> str:
        return "–" if self.share is None else "keep" if self.share < 1 else "slower"


@dataclass(frozen=True)
class KernelsReport:
    machine: str
    rows: tuple[KernelResult, ...]
    choices: tuple[str, ...]
    """what the engine would choose among kernels that are not ours, by shape: causal attention, and where gates are computed"""


def shapes(tokens: int | None, hidden: int | None) -> list[KernelShape]:
    """Those of benchmarks/gpu, or one of the given width."""
    if hidden is None:
        models = {"1b": (2048, 8192, 32, 64, 8), "3b": (3072, 8192, 24, 128, 4)}
    elif hidden % 128 or not 128 <= hidden <= 2**16:
        raise SpecError(f"--hidden is {hidden} but must be a multiple of 128 from 128 to 65536, such as 4096")
    else:
        models = {f"{hidden}": (hidden, 4 * hidden, hidden // 128, 128, 4)}
    if tokens is not None and not 1 <= tokens <= 2**24:
        raise SpecError(f"--tokens is {tokens} but must be from 1 to {2**24}, such as 32768")
    found = []
    for name, (width, ffn, heads, head_dim, mbs) in models.items():
        kv_heads = 8 if heads % 8 == 0 else 1
        model = Model(
            name=name, layers=1, hidden=width, ffn=ffn, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            vocab=128256, rope_theta=500000.0,
        )  # fmt: skip
        asked = tokens or mbs * SEQ
        seq = SEQ if asked % SEQ == 0 else asked
        found.append(KernelShape(model, asked // seq, seq))
    return found


def chosen(only: str | None) -> list[str]:
    """The kernels of `--only norm,gate`; all of them without it."""
    if only is None:
        return list(KERNELS)
    words = [word.strip().lower() for word in only.split(",") if word.strip()]
    for word in words:
        if word not in KERNELS:
            raise SpecError(f"--only is '{only:.60}': {nearest(word, KERNELS)}")
    if not words:
        raise SpecError(f"--only names no kernel: try {KERNELS[0]}, or several of {','.join(KERNELS)}")
    return [kernel for kernel in KERNELS if kernel in words]
