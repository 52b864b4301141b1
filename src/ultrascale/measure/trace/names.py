"""Whose exchange is it? Names in a trace, ours and those of other engines, as techniques and kinds of collectives."""

from __future__ import annotations

import re
from typing import Any

TECHNIQUES = ("tensor", "context", "expert", "pipeline", "zero", "data", "bookkeeping", "unknown")
"""in the order in which a moment that several of them fill is given to one"""
ACTION = re.compile(r"(forward|backward|input gradients|weight gradients) stage (\d+) micro-batch (\d+)\Z")
"""the pipeline's actions, as parallel/pipeline.py names them"""
STEP = re.compile(r"ProfilerStep#(\d+)\Z")

_OURS = re.compile(r"(tensor|context|expert|pipeline|zero|data|bookkeeping) ([a-z_]+)\Z")
_GROUPS = (
    ("zero", {"fsdp", "efsdp", "hsdp", "shard", "zero"}),
    ("data", {"dp", "ddp", "edp", "data", "replicate"}),
    ("pipeline", {"pp", "pipeline"}),
    ("tensor", {"tp", "tensor", "sp"}),
    ("expert", {"ep", "expert"}),
    ("context", {"cp", "context"}),
)
"""words in the name of a process group; those of data ranks first: `dp_shard_cp` cuts weights, not sequences"""
_KINDS = (
    ("all_reduce", ("allreduce",)),
    ("reduce_scatter", ("reducescatter",)),
    ("all_gather", ("allgather",)),
    ("all_to_all", ("alltoall",)),
    ("send_recv", ("send", "recv", "coalesced")),
    ("broadcast", ("broadcast",)),
    ("barrier", ("barrier",)),
)
_BY_KIND = {"send_recv": "pipeline", "all_to_all": "expert"}
"""whose an exchange most likely is where nothing else tells"""
_SIZES = {"double": 8, "long": 8, "float": 4, "int": 4, "bfloat16": 2, "half": 2, "short": 2}


def our_exchange(name: str) -> tuple[str, str] | None:
    """The technique and the kind of `tensor all_reduce`, `data wait`; None: no exchange of ours."""
    found = _OURS.match(name)
    return (found[1], found[2]) if found else None


def technique_of_range(name: str) -> str | None:
    """Of what is exchanged within a range: ours, torch's FSDP, torch's pipelines."""
    if (ours := our_exchange(name)) is not None:
        return ours[0]
    if name.startswith("FSDP::") or "FullyShardedDataParallel" in name:
        return "zero"
    if name.startswith("PP::"):
        return "pipeline"
    return None


def technique_of_group(*names: str) -> str | None:
    """Of the description or name that an engine gave a process group: `mesh_dp_shard`, `TENSOR_MODEL_PARALLEL_GROUP`."""
    for name in names:
        words = {word.rstrip("0123456789") for word in re.split(r"[^a-z0-9]+", name.lower())}
        for technique, signs in _GROUPS:
            if words & signs:
                return technique
    return None


def technique_of_kind(kind: str) -> str:
    return _BY_KIND.get(kind, "unknown")


def kind_of(name: str) -> str:
    """`all_reduce` of `ncclDevKernel_AllReduce_Sum_bf16_RING_LL(…)`, `c10d::allreduce_` or `gloo:all_reduce`."""
    plain = name.lower().replace("_", "").replace("-", "")
    return next((kind for kind, signs in _KINDS if any(sign in plain for sign in signs)), "other")


def is_collective_kernel(name: str) -> bool:
    return name.startswith(("nccl", "rccl", "mscclKernel", "void nccl"))


def is_collective_op(name: str) -> bool:
    """Operators with which a host starts an exchange."""
    return name.startswith(("c10d::", "_c10d_functional::", "nccl:", "record_param_comms"))


def is_optimizer(name: str) -> bool:
    return name == "optimizer" or name.startswith("Optimizer.step#")


def computes(name: str) -> bool:
    """Does an operator of the host compute, or does it only hold others that do?"""
    if name.startswith(("aten::", "CompiledFunction", "Torch-Compiled Region", "## Call CompiledFxGraph")):
        return True
    return (
        "::" in name
        and not name.startswith(("autograd::", "torch::autograd", "torch.", "profiler::"))
        and not is_collective_op(name)
    )


def message_bytes(facts: dict[str, Any]) -> int | None:
    """Of a collective, from what Kineto tells of it: the larger of what goes in and what comes out."""
    counts = [facts.get("In msg nelems"), facts.get("Out msg nelems")]
    numbers = [count for count in counts if isinstance(count, int)]
    size = _SIZES.get(str(facts.get("dtype", "")).lower(), 1)
    return max(numbers) * size if numbers else None
