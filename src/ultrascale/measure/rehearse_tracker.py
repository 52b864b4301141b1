"""Track what a rank does in a step, operator by operator: live memory and its peak, FLOPs, collectives.

It sees what passes torch's dispatcher: our collectives and those of FSDP2, GEMMs and attention by torch's formulas, but nothing
inside a kernel of ours.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from ultrascale.cost.network import Op, wire_bytes
from ultrascale.kernels import flash, gated_gemm
from ultrascale.measure.rehearse import Collective
from ultrascale.measure.rehearse_world import QuickFakeTensorMode
from ultrascale.parallel.torch_private import resolve_group
from ultrascale.schedules import ActionKind
from ultrascale.train.engine import Engine
from ultrascale.train.memory import LiveBytes, tensors_in

aten = torch.ops.aten
_MATMULS = {aten.mm: 0, aten.addmm: 1, aten._grouped_mm: 0, gated_gemm.BACKWARD: 0}
"""index of the first of two operands among the arguments"""
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: (0, 4),
    aten._scaled_dot_product_flash_attention: (0, 4),
    aten._scaled_dot_product_cudnn_attention: (0, 6),
    aten._scaled_dot_product_efficient_attention: (0, 6),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 7),
    aten._scaled_dot_product_flash_attention_backward: (1, 11),
    aten._scaled_dot_product_cudnn_attention_backward: (1, 14),
    aten._scaled_dot_product_efficient_attention_backward: (1, 11),
    flash.FORWARD: (0, None),
    flash.BACKWARD: (1, None),
}
"""attention: index of q among the arguments, and of is_causal; None: always causal, with tokens before heads"""

_COLLECTIVES: dict[str, tuple[Op, int]] = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send_recv", 0),
    "broadcast_": ("broadcast", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "reduce_": ("reduce", 0),
}
"""c10d operators: the collective, and the argument whose bytes the law counts; a receive is counted as the peer's send"""
_FUNCTIONAL: dict[str, tuple[Op, str]] = {
    **dict.fromkeys(("all_reduce", "all_reduce_", "all_reduce_coalesced"), ("all_reduce", "argument")),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_into_tensor_coalesced"), ("all_gather", "result")),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"), ("reduce_scatter", "argument")),
    "all_to_all_single": ("all_to_all", "argument"),
    **dict.fromkeys(("broadcast", "broadcast_"), ("broadcast", "argument")),
    "flex_cp_allgather": ("all_gather", "result"),  # of torch's context parallelism: keys, and values
    "flex_cp_allgather_backward": ("reduce_scatter", "argument"),
}
"""functional collectives: the collective, and whether its result or its first argument is the buffer that the law counts"""


class StepPosition(NamedTuple):
    """A position in a step: phase, index in the pipeline's action list (None outside), layer."""

    phase: str
    place: int | None
    layer: str


class CollectiveCall(NamedTuple):
    """A collective, as the laws of cost/ name it."""

    technique: str
    kind: Op
    group: int
    sent: float
    """bytes that this rank sends; fractional where ranks do not divide the buffer"""


class OperatorCounter(LiveBytes, ABC):  # type: ignore[no-untyped-call]
    """Tracks live memory, as `LiveBytes`, and counts FLOPs and collectives by position in the step."""

    def __init__(self, fake: QuickFakeTensorMode | None = None) -> None:
        """`fake`: the mode of tensors without memory, which calls this tracker."""
        super().__init__()
        self.fake = fake
        self.phase, self.layer = "reading", ""
        self.peak_position = StepPosition("", None, "")
        self.most: Counter[str] = Counter()
        """maximum of each owner, at the peak or not"""
        self.calls: Counter[tuple[int | None, str, CollectiveCall]] = Counter()
        """by index of the pipeline's action, and forward, backward or phase"""
        self.flops: Counter[tuple[int | None, str]] = Counter()
        """by index of the pipeline's action, and operator"""

    @property
    def position(self) -> StepPosition:
        return StepPosition(self.phase, None, self.layer)

    @abstractmethod
    def technique_of(self, group: dist.ProcessGroup) -> str:
        """The owner of the group's collectives, such as tensor."""

    @abstractmethod
    def where(self, place: int | None) -> str:
        """forward, backward, or the phase."""

    def track(self, tensors: Iterable[Tensor], owner: str) -> None:
        super().track(tensors, owner)
        self.most |= Counter(self.by_owner)

    def reset_peak(self) -> None:
        super().reset_peak()
        self.peak_position = self.position
        self.most |= Counter(self.peak_by_owner)

    def _begin(self) -> None:
        if self.fake is None:
            super()._begin()
        else:
            self.fake.watcher = self

    def _end(self, *failure: Any) -> None:
        if self.fake is None:
            super()._end(*failure)
        else:
            self.fake.watcher = None

    def after_operator(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        super().after_operator(func, args, kwargs, result)
        self.count(func, args, kwargs, result)

    def count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        formula = _formula(func)
        if formula is not None:
            name = "attention" if func._overloadpacket in _ATTENTION else str(func._opname)
            self.flops[self.position.place, name] += int(formula(args, kwargs, result))
        elif func.namespace == "c10d":
            self._count_collective(func, args)
        elif func.namespace in ("_c10d_functional", "cplib"):
            self._count_functional(func, args, result)

    def _count_collective(self, func: Any, args: tuple[Any, ...]) -> None:
        found = _COLLECTIVES.get(func._opname)
        if found is None:
            return
        kind, buffer = found
        group = next(group for group in map(_group, args) if group is not None)
        self._add_call(kind, group, args[buffer])

    def _count_functional(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        found = _FUNCTIONAL.get(func._opname)
        if found is not None:
            kind, whole = found
            pair = func.namespace == "cplib"
            buffers = result if whole == "result" else args[:2] if pair else args[0]
            if func._opname == "all_to_all_single" and sum(map(bool, args[2])) == 1:  # to one rank, as torch's rings send
                kind = "send_recv"
            for buffer in buffers if pair else (buffers,):
                self._add_call(kind, resolve_group(args[-1]), buffer)

    def _add_call(self, kind: Op, group: dist.ProcessGroup, buffer: Any) -> None:
        place = self.position.place
        sent = float(wire_bytes(kind, sum(tensor.nbytes for tensor in tensors_in(buffer)), group.size()))
        self.calls[place, self.where(place), CollectiveCall(self.technique_of(group), kind, group.size(), sent)] += 1

    def collectives(self, weight: Callable[[int | None], int] = lambda _: 1) -> tuple[Collective, ...]:
        """Calls of one kind together. `weight`: how often the step runs the pipeline's action at an index."""
        together: dict[tuple[str, str, int, str], tuple[int, float]] = {}
        for (place, where, call), count in self.calls.items():
            key = call.technique, call.kind, call.group, where
            number, sent = together.get(key, (0, 0.0))
            times = count * weight(place)
            together[key] = number + times, sent + times * call.sent
        return tuple(
            Collective(*key, number, round(sent))
            for key, (number, sent) in sorted(together.items(), key=lambda one: (one[0][0], -one[1][1]))
        )


class OperatorTracker(OperatorCounter):  # type: ignore[no-untyped-call]
    """The counter of our engine, which knows the pipeline's action and the technique of each process group."""

    def __init__(self, engine: Engine, techniques: Mapping[str, str], fake: QuickFakeTensorMode | None = None) -> None:
        super().__init__(fake)
        self.engine = engine
        links = engine.pipeline.links.groups.values()
        self.techniques = dict(techniques) | {str(group.group_name): "pipeline" for group in links}
        """by the name of a process group"""

    @property
    def position(self) -> StepPosition:
        pipeline = self.engine.pipeline
        place = len(pipeline.ran) if self.phase == "pipeline" else None
        return StepPosition(self.phase, place, self.layer)

    def technique_of(self, group: dist.ProcessGroup) -> str:
        return self.techniques[group.group_name]

    def reset_peak(self) -> None:
        if self.phase == "optimizer" and self.engine.mesh.layout.offload != "none":
            return  # its copies of gradients are on the host, which is the same device here
        super().reset_peak()

    def where(self, place: int | None) -> str:
        """forward, backward, or the phase outside of the pipeline."""
        actions = self.engine.pipeline.schedule.actions[self.engine.pipeline.rank]
        if place is None or place >= len(actions):
            return "gradients" if self.phase == "pipeline" else self.phase
        return _WHERE[actions[place].kind]


_WHERE = {ActionKind.F: "forward", ActionKind.B: "backward", ActionKind.I: "backward", ActionKind.W: "backward"}


def attach(engine: Engine, tracker: OperatorTracker) -> None:
    """Tell the tracker the phase of the step and the layer, in forward and backward."""

    def within(owner: Any, name: str, phase: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            before, tracker.phase = tracker.phase, phase
            try:
                return inner(*args, **kwargs)
            finally:
                tracker.phase = before

        setattr(owner, name, outer)

    within(engine, "read", "reading")
    within(engine.pipeline, "step", "pipeline")
    within(engine, "_complete_gradients", "gradients")
    within(engine, "_sum_of_losses", "loss")
    within(engine.optimizer, "norm", "norm")
    within(engine.optimizer, "step", "optimizer")
    if engine.balance is not None:
        within(engine.balance, "take", "loads")
    for chunk in engine.pipeline.chunks.values():
        module = chunk.gradients.module
        parts = {f"layer {index}": block for index, block in module.blocks.items()}  # type: ignore[operator,union-attr]
        parts |= {name: part for name in ("embed", "head") if (part := getattr(module, name)) is not None}
        for name, part in parts.items():
            _track_layer(part, _LABELS.get(name, name), tracker)


_LABELS = {"embed": "the embedding", "head": "the head and the loss"}


def _track_layer(part: torch.nn.Module, name: str, tracker: OperatorTracker) -> None:
    def there(*_: Any) -> None:
        tracker.layer = name

    def back(_: Any, __: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(there)  # type: ignore[no-untyped-call]

    part.register_forward_pre_hook(there)
    part.register_forward_hook(back)


def _group(value: Any) -> dist.ProcessGroup | None:
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(value)
    except RuntimeError:  # a ReduceOp
        return None


@cache
def _formula(func: Any) -> Callable[[Any, Any, Any], float] | None:
    packet = getattr(func, "_overloadpacket", None)
    if packet in _ATTENTION:
        first, causal = _ATTENTION[packet]
        # Backward counts twice the GEMMs of forward, without recomputation inside the kernel (cost/flops.py).
        times = (2 if first else 1) * 0.5

        def attention(args: Any, kwargs: Any, _: Any) -> float:
            q, k, v = (x.shape for x in args[first : first + 3])
            if causal is None:
                q, k, v = (torch.Size((x[0], x[2], x[1], x[3])) for x in (q, k, v))
            masked = causal is None or (args[causal] if len(args) > causal else kwargs.get("is_causal", False))
            # GPU kernels accept fewer kv heads than query heads, which torch 2.11 refuses to count.
            keys, values = ((x[0], q[1], *x[2:]) for x in (k, v))
            whole = float(sdpa_flop_count(q, keys, values))  # type: ignore[no-untyped-call]
            return whole * times * (1 if masked else 2)

        return attention
    if packet in _MATMULS:
        # By the operands: torch's formulas do not know GEMMs with an output format.
        first = _MATMULS[packet]
        return lambda args, kwargs, out: 2.0 * math.prod(args[first].shape) * args[first + 1].shape[-1]
    if packet is gated_gemm.FORWARD:
        return lambda args, kwargs, out: 2.0 * args[0].numel() * len(args[1])
    if packet in flop_registry:
        return lambda args, kwargs, out: float(flop_registry[packet](*args, **kwargs, out_val=out))
    return None
