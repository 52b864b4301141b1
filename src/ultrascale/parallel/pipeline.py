"""Pipeline parallelism: runs exactly the action lists that schedules/ gives the planner. One rank is a pipeline too.

A rank computes its actions in order. Messages between two ranks travel in the order in which the sender computes them, on a
group of their own per direction, and are received in that order: no link can wait for another. The law is cost/pipeline.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist

from ultrascale.parallel.comm import WaitClock
from ultrascale.parallel.data import GradientReducer
from ultrascale.parallel.float8_gather import Float8GatherScales
from ultrascale.parallel.mesh import Mesh
from ultrascale.parallel.multi_linear import DeferredWeightGrads
from ultrascale.parallel.ranges import exchange, named
from ultrascale.schedules import Action, ActionKind, Schedule

Actions = Sequence[Sequence[Action]]
PASSES = {ActionKind.F: "forward", ActionKind.B: "backward", ActionKind.I: "input gradients", ActionKind.W: "weight gradients"}


class StageMessage(NamedTuple):
    """What stage `stage` made of a micro-batch: its output on the way down, its input's gradient on the way up."""

    kind: ActionKind
    stage: int
    microbatch: int


@dataclass(frozen=True)
class StageRoutes:
    """Where stages live, and which messages each link carries, in order."""

    schedule: Schedule
    actions: Actions

    def target(self, action: Action) -> int | None:
        """The rank that waits for what an action makes; None: nobody, or only its weights."""
        schedule = self.schedule
        if action.kind is ActionKind.F:
            return schedule.rank_of(action.stage + 1) if action.stage + 1 < schedule.stages else None
        if action.kind is ActionKind.W:
            return None
        return schedule.rank_of(action.stage - 1) if action.stage > 0 else None

    def messages(self, source: int, target: int) -> list[StageMessage]:
        return [_message(action) for action in self.actions[source] if self.target(action) == target != source]

    @cached_property
    def made_at(self) -> list[dict[StageMessage, int]]:
        """Per rank, the place in its list at which it makes each message."""
        return [
            {_message(action): place for place, action in enumerate(actions) if action.kind is not ActionKind.W}
            for actions in self.actions
        ]

    def used_at(self, message: StageMessage, target: int) -> int:
        """The place in the target's list that takes a message: the same pass of the stage next on its way."""
        following = message.stage + (1 if message.kind is ActionKind.F else -1)
        return self.made_at[target][message._replace(stage=following)]


def _message(action: Action) -> StageMessage:
    return StageMessage(ActionKind.F if action.kind is ActionKind.F else ActionKind.B, action.stage, action.microbatch)


def forwards_only(schedule: Schedule) -> StageRoutes:
    """The route of an evaluation: every stage of a rank in turn, all micro-batches through each."""
    actions = [
        [Action(ActionKind.F, stage, k) for stage in schedule.stages_of(rank) for k in range(schedule.microbatches)]
        for rank in range(schedule.ranks)
    ]
    return StageRoutes(schedule, actions)


@dataclass
class StageChunk:
    """One stage on this rank."""

    stage: int
    gradients: GradientReducer
    deferred: DeferredWeightGrads


@dataclass
class Batch:
    """One rank's tokens of a step, by micro-batch, and the positions of its part of the sequence."""

    inputs: Callable[[int], torch.Tensor]
    targets: Callable[[int], torch.Tensor]
    positions: torch.Tensor
    documents: Callable[[int], torch.Tensor] | None = None
    """which document each token is part of, where attention stays within one"""


@dataclass
class _MicrobatchState:
    """A micro-batch between its forward and its backward on one stage."""

    x: torch.Tensor
    y: torch.Tensor


@dataclass
class PipelineLinks:
    """This rank's ends of the links to its pipeline neighbours."""

    mesh: Mesh
    shape: tuple[int, ...]
    dtype: torch.dtype
    groups: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mesh.pp.size > 1:
            self.groups = self.mesh.links()

    def send(self, x: torch.Tensor, target: int, tag: int) -> dist.Work | None:
        there = self.mesh.pp.ranks[target]
        with exchange("pp", "send"):
            return dist.isend(x, there, group=self.groups[self.mesh.rank, there], tag=tag)

    def receive(self, source: int, tag: int) -> tuple[torch.Tensor, dist.Work | None]:
        there = self.mesh.pp.ranks[source]
        x = torch.empty(self.shape, dtype=self.dtype, device=self.mesh.device)
        with exchange("pp", "recv"):
            return x, dist.irecv(x, there, group=self.groups[there, self.mesh.rank], tag=tag)


class _StageMailbox:
    """The messages of one step: posts receives in the sender's order, hands over what stays on the rank."""

    def __init__(self, route: StageRoutes, rank: int, links: PipelineLinks, clock: WaitClock) -> None:
        self.route, self.rank, self.links, self.clock = route, rank, links, clock
        others = [other for other in range(route.schedule.ranks) if other != rank]
        self.expected = {other: deque(enumerate(route.messages(other, rank))) for other in others}
        self.sent = dict.fromkeys(others, 0)
        self.arriving: dict[StageMessage, tuple[torch.Tensor, dist.Work | None]] = {}
        self.leaving: dict[int, list[tuple[int, torch.Tensor, dist.Work | None]]] = {other: [] for other in others}
        """per target: when it uses what was sent, and what must live until then"""

    def give(self, message: StageMessage, x: torch.Tensor, target: int) -> None:
        if target == self.rank:
            self.arriving[message] = (x, None)
            return
        x = x.contiguous()
        work = self.links.send(x, target, self.sent[target])
        self.leaving[target].append((self.route.used_at(message, target), x, work))
        self.sent[target] += 1

    def take(self, message: StageMessage, source: int) -> torch.Tensor:
        queue = self.expected.get(source)
        while message not in self.arriving:
            assert queue, f"{message} never leaves rank {source}"
            tag, following = queue.popleft()
            self.arriving[following] = self.links.receive(source, tag)
        x, work = self.arriving.pop(message)
        if work is not None:
            with self.clock.waiting("pp"):
                work.wait()
            self._let_go(source, self.route.made_at[source][message])
        return x

    def close(self) -> None:
        for other in self.leaving:
            self._let_go(other)

    def _let_go(self, target: int, place: float = math.inf) -> None:
        """Frees what the target has used before `place`: a message that it made there says so, long before gloo would."""
        for used, _, work in self.leaving[target]:
            if used <= place and work is not None:
                with exchange("pp", "wait"):
                    work.wait()
        self.leaving[target] = [one for one in self.leaving[target] if one[0] > place]


class Pipeline:
    """The chunks of one rank and the order in which they work."""

    def __init__(
        self,
        chunks: Sequence[StageChunk],
        schedule: Schedule,
        mesh: Mesh,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        scales: Float8GatherScales | None = None,
    ) -> None:
        self.mesh, self.schedule, self.scales = mesh, schedule, scales
        self.rank = mesh.pp.rank
        self.chunks = {chunk.stage: chunk for chunk in chunks}
        self.route = StageRoutes(schedule, schedule.actions)
        self.links = PipelineLinks(mesh, shape, dtype)
        self.last_stage = schedule.stages - 1
        mine = schedule.actions[self.rank]
        self.split = {action.stage for action in mine if action.kind is ActionKind.W}
        finals = {action.stage: place for place, action in enumerate(mine) if action.kind in (ActionKind.B, ActionKind.W)}
        self.finals = set(finals.values())
        self.ran: list[Action] = []
        """what the last step computed, in order"""
        self.microbatch: int | None = None
        """the micro-batch whose forward is running; None outside of a forward, in recomputation too"""

    def step(self, batch: Batch, scale: float) -> torch.Tensor:
        """All forwards and backwards of one step; the sum of this rank's losses. `scale` weighs each token's loss."""
        mail = _StageMailbox(self.route, self.rank, self.links, self.mesh.clock)
        kept: dict[tuple[int, int], _MicrobatchState] = {}
        pending: dict[tuple[int, int], list[Callable[[], None]]] = {}
        total = torch.zeros((), device=self.mesh.device)
        self.ran = []
        self._agree()
        for chunk in self.chunks.values():
            chunk.gradients.begin()
        for place, action in enumerate(self.schedule.actions[self.rank]):
            chunk, key = self.chunks[action.stage], (action.stage, action.microbatch)
            last, split = place in self.finals, action.stage in self.split
            with named(PASSES[action.kind], "stage", action.stage, "micro-batch", action.microbatch):
                if action.kind is ActionKind.F:
                    kept[key] = self._forward(chunk, action, batch, mail)
                    if action.stage == self.last_stage:
                        total += kept[key].y.detach()
                elif action.kind is ActionKind.W:
                    _run_deferred(pending.pop(key))
                    chunk.gradients.after_backward(last, split)
                else:
                    chunk.deferred.open = action.kind is ActionKind.I
                    chunk.gradients.before_backward(last, split)
                    self._backward(action, kept.pop(key), scale, mail)
                    chunk.deferred.open = False
                    if action.kind is ActionKind.I:
                        pending[key] = chunk.deferred.pop()
                    else:
                        chunk.gradients.after_backward(last, split)
            self.ran.append(action)
        mail.close()
        for chunk in self.chunks.values():
            chunk.gradients.finish()
        return total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """All forwards; the sum of this rank's losses."""
        route = forwards_only(self.schedule)
        mail = _StageMailbox(route, self.rank, self.links, self.mesh.clock)
        total = torch.zeros((), device=self.mesh.device)
        self._agree()
        for action in route.actions[self.rank]:
            y = self._forward(self.chunks[action.stage], action, batch, mail).y
            if action.stage == self.last_stage:
                total += y
        mail.close()
        return total

    def _agree(self) -> None:
        """Weights may have changed since the last forwards."""
        if self.scales is not None:
            self.scales.agree()

    def _forward(self, chunk: StageChunk, action: Action, batch: Batch, mail: _StageMailbox) -> _MicrobatchState:
        stage, k = action.stage, action.microbatch
        if stage == 0:
            x = batch.inputs(k)
        else:
            x = mail.take(StageMessage(ActionKind.F, stage - 1, k), self.schedule.rank_of(stage - 1)).requires_grad_(
                torch.is_grad_enabled()
            )
        targets = batch.targets(k) if stage == self.last_stage else None
        documents = (batch.documents(k),) if batch.documents is not None else ()
        self.microbatch = k
        y = chunk.gradients.module(x, batch.positions, targets, *documents)
        self.microbatch = None
        target = self.route.target(Action(ActionKind.F, stage, k))
        if target is not None:
            mail.give(StageMessage(ActionKind.F, stage, k), y.detach(), target)
        return _MicrobatchState(x, y)

    def _backward(self, action: Action, kept: _MicrobatchState, scale: float, mail: _StageMailbox) -> None:
        stage, k = action.stage, action.microbatch
        if stage == self.last_stage:
            grad = torch.full_like(kept.y, scale)
        else:
            grad = mail.take(StageMessage(ActionKind.B, stage + 1, k), self.schedule.rank_of(stage + 1))
        torch.autograd.backward(kept.y, grad)
        target = self.route.target(action)
        if target is not None:
            assert kept.x.grad is not None
            mail.give(_message(action), kept.x.grad, target)


def _run_deferred(pending: list[Callable[[], None]]) -> None:
    """Pays in the order in which it was pending, and lets go of each as soon as it is paid."""
    pending.reverse()
    while pending:
        pending.pop()()
