"""The playbook's ladders as data: for each technique its steps, from the plain form to the best, and what each changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LADDERS = ("data", "zero", "tensor", "context", "pipeline", "recompute", "precision", "kernels")
ACCUMULATED = 4  # micro-batches, where reducing after each or only after the last is compared
IN_FLIGHT = 4  # micro-batches per pipeline stage: the bubble of the plain schedules is still large


@dataclass(frozen=True)
class PlannedRung:
    """One rung: what is set, beyond the size of the micro-batch."""

    name: str
    what: str
    world: int = 1
    """processes that it needs"""
    layout: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    precision: str | None = None
    """None: what the machine trains in"""
    gpu_alone: bool = False


def planned(ladder: str, world: int) -> list[PlannedRung]:
    """The rungs with as many processes as there are, and at least two where one has nobody to talk to."""
    return _RUNGS[ladder](max(2, world))


def _data(world: int) -> list[PlannedRung]:
    each = {"reduce_every_microbatch": True}
    rungs: tuple[tuple[str, str, str, dict[str, bool]], ...] = (
        ("naive", "gradients meet after backward, one tensor at a time, in every micro-batch", "naive", each),
        ("hooks", "each tensor as soon as its gradient is made", "hooks", each),
        ("buckets", "several tensors together, as soon as all are made", "bucketed", each),
        ("last only", "buckets, in the last micro-batch alone", "bucketed", {}),
    )
    shape = {"dp": world, "gas": ACCUMULATED}
    return [PlannedRung(name, what, world, {**shape, "data_parallel": way}, train) for name, what, way, train in rungs]


def _zero(world: int) -> list[PlannedRung]:
    what = ("every rank holds everything", "optimizer states sharded", "gradients too", "parameters too, gathered when used")
    return [PlannedRung(f"ZeRO-{n}", words, world, {"dp": world, "zero": n}) for n, words in enumerate(what)]


def _tensor(world: int) -> list[PlannedRung]:
    return [
        PlannedRung(
            "TP", "matrices cut; norms and residuals whole on every rank", world, {"tp": world, "sequence_parallel": False}
        ),
        PlannedRung("TP+SP", "norms and residuals cut along the sequence", world, {"tp": world, "sequence_parallel": True}),
    ]


def _context(world: int) -> list[PlannedRung]:
    rungs = {
        "allgather": "every rank gathers all keys and values",
        "ring": "keys and values go round while attention computes",
        "zigzag": "the ring, with two slices each so that the causal mask leaves all ranks alike much",
    }
    return [PlannedRung(way, what, world, {"cp": world, "context_parallel": way}) for way, what in rungs.items()]


def _pipeline(world: int) -> list[PlannedRung]:
    rungs = (
        ("AFAB", "all forwards, then all backwards", "afab", 1),
        ("1F1B", "backwards as early as they can: fewer micro-batches are held", "1f1b", 1),
        ("interleaved", "two chunks of layers each: half the bubble", "interleaved", 2),
        ("zero bubble", "weight gradients apart, where the bubble was", "zero-bubble", 1),
        ("DualPipe", "two chunks folded to a V, weight gradients apart", "dualpipe-v", 2),
    )
    shape = {"pp": world, "gas": IN_FLIGHT * world}
    return [
        PlannedRung(name, what, world, {**shape, "schedule": schedule, "virtual_stages": chunks})
        for name, what, schedule, chunks in rungs
    ]


def _recompute(_: int) -> list[PlannedRung]:
    rungs = {
        "none": "every activation is kept",
        "selective": "norms, rotations and gates computed again in backward",
        "full": "only each layer's input is kept",
    }
    return [PlannedRung(policy, what, layout={"recompute": policy}) for policy, what in rungs.items()]


def _precision(_: int) -> list[PlannedRung]:
    rungs = {
        "fp32": "all in fp32",
        "bf16": "products in bf16, an fp32 master of the weights",
        "fp8": "products of the blocks in fp8, with a scale per tensor",
    }
    return [PlannedRung(precision, what, precision=precision) for precision, what in rungs.items()]


def _kernels(_: int) -> list[PlannedRung]:
    rungs = {
        "eager": "torch's operators one by one",
        "compile": "torch.compile of every block and of the head",
        "fused": "our own kernels, torch.compile for the rest",
    }
    return [PlannedRung(way, what, train={"kernels": way}, gpu_alone=way != "eager") for way, what in rungs.items()]


_RUNGS = {
    "data": _data,
    "zero": _zero,
    "tensor": _tensor,
    "context": _context,
    "pipeline": _pipeline,
    "recompute": _recompute,
    "precision": _precision,
    "kernels": _kernels,
}
