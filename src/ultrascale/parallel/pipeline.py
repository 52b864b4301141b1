"""Pipeline parallelism: executes the action lists of schedules/, the same that the planner uses, on one or more ranks.

A rank computes its actions in order. Messages between two ranks are sent in the order in which the sender computes them, on a
process group per direction, and received in that order: no link can wait for another. The cost model is cost/communication.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist

from ultrascale.kernels.deferred import DeferredWeightGrads
from ultrascale.parallel.comm import WaitClock, comm_range, profile_range
from ultrascale.parallel.data import GradientReducer
from ultrascale.parallel.mesh import Mesh
from ultrascale.parallel.zero import Float8GatherScales
from ultrascale.schedules import Action, ActionKind, Schedule, build

Actions = Sequence[Sequence[Action]]
PASSES = {ActionKind.F: "forward", ActionKind.B: "backward", ActionKind.I: "input gradients", ActionKind.W: "weight gradients"}


StageMessage = Action
"""The result of a stage for a micro-batch: its output (F), or the gradient of its input (B, also of a split backward)."""


@dataclass(frozen=True)
class StageRoutes:
    """The rank of each stage, and the messages of each link in order."""

    schedule: Schedule
    actions: Actions

    def target(self, action: Action) -> int | None:
        """The rank that needs the result of an action; None for the last stage, the first stage's gradients and W actions."""
        schedule = self.schedule
        if action.kind is ActionKind.F:
            return schedule.rank_of(action.stage + 1) if action.stage + 1 < schedule.stages else None
        if action.kind is ActionKind.W:
            return None
        return schedule.rank_of(action.stage - 1) if action.stage > 0 else None

    def messages(self, source: int, target: int) -> list[StageMessage]:
        return [_message(action) for action in self.actions[source] if self.target(action) == target != source]

    @cached_property
    def produced_at(self) -> list[dict[StageMessage, int]]:
        """Per rank, the index in its action list at which it computes each message."""
        return [
            {_message(action): place for place, action in enumerate(actions) if action.kind is not ActionKind.W}
            for actions in self.actions
        ]

    def consumed_at(self, message: StageMessage, target: int) -> int:
        """The index in the target's action list that consumes a message: the same pass of the next (or previous) stage."""
        following = message.stage + (1 if message.kind is ActionKind.F else -1)
        return self.produced_at[target][message._replace(stage=following)]


def _message(action: Action) -> StageMessage:
    return StageMessage(ActionKind.F if action.kind is ActionKind.F else ActionKind.B, action.stage, action.microbatch)


def forwards_only(schedule: Schedule) -> StageRoutes:
    """The routes of an evaluation: each rank runs its stages in turn, all micro-batches through each."""
    actions = [
        [Action(ActionKind.F, stage, k) for stage in schedule.stages_of(rank) for k in range(schedule.microbatches)]
        for rank in range(schedule.ranks)
    ]
    return StageRoutes(schedule, actions)


@dataclass
class StageChunk:
    """One pipeline stage on this rank."""

    stage: int
    gradients: GradientReducer
    deferred: DeferredWeightGrads


@dataclass
class Batch:
    """One rank's tokens of a step."""

    microbatches: Sequence[tuple[torch.Tensor, ...]]
    """inputs, targets and, if attention is masked by document, the document index of each token"""
    positions: torch.Tensor
    """of this rank's slice of the sequence"""
    losses: int
    """how many tokens of the global batch, over all ranks, have a loss"""
    has_ahead: bool = False
    """whether each micro-batch ends with what multi-token prediction reads and predicts"""


@dataclass
class PipelineLinks:
    """Point-to-point communication of this rank with its pipeline neighbours."""

    mesh: Mesh
    shape: tuple[int, int, int]
    """of a message: sequences, tokens of each on this rank, and the hidden size"""
    dtype: torch.dtype
    groups: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mesh.pp.size > 1:
            self.groups = self.mesh.links()

    def begin(self, batch: Batch) -> None:
        """Messages have the batch's sequences, which may be more and shorter than the last one's."""
        rows, (sequences, tokens, hidden) = len(batch.microbatches[0][0]), self.shape
        self.shape = rows, sequences * tokens // rows, hidden

    def send(self, x: torch.Tensor, target: int, tag: int) -> dist.Work | None:
        peer = self.mesh.pp.ranks[target]
        with comm_range("pp", "send"):
            return dist.isend(x, peer, group=self.groups[self.mesh.rank, peer], tag=tag)

    def receive(self, source: int, tag: int) -> tuple[torch.Tensor, dist.Work | None]:
        peer = self.mesh.pp.ranks[source]
        x = torch.empty(self.shape, dtype=self.dtype, device=self.mesh.device)
        with comm_range("pp", "recv"):
            return x, dist.irecv(x, peer, group=self.groups[peer, self.mesh.rank], tag=tag)


class _StageMailbox:
    """The messages of one step: posts receives in the sender's order; passes messages within the rank without copying."""

    def __init__(self, route: StageRoutes, rank: int, links: PipelineLinks, clock: WaitClock) -> None:
        self.route, self.rank, self.links, self.clock = route, rank, links, clock
        others = [other for other in range(route.schedule.ranks) if other != rank]
        self.expected = {other: deque(enumerate(route.messages(other, rank))) for other in others}
        self.sent = dict.fromkeys(others, 0)
        self.received: dict[StageMessage, tuple[torch.Tensor, dist.Work | None]] = {}
        self.in_flight: dict[int, list[tuple[int, torch.Tensor, dist.Work | None]]] = {other: [] for other in others}
        """per target: the index of the action that consumes a message, and the tensor, which must stay allocated until then"""

    def send(self, message: StageMessage, x: torch.Tensor, target: int) -> None:
        if target == self.rank:
            self.received[message] = (x, None)
            return
        x = x.contiguous()
        work = self.links.send(x, target, self.sent[target])
        self.in_flight[target].append((self.route.consumed_at(message, target), x, work))
        self.sent[target] += 1

    def receive(self, message: StageMessage, source: int) -> torch.Tensor:
        queue = self.expected.get(source)
        while message not in self.received:
            assert queue, f"{message} never leaves rank {source}"
            tag, following = queue.popleft()
            self.received[following] = self.links.receive(source, tag)
        x, work = self.received.pop(message)
        if work is not None:
            with self.clock.waiting("pp"):
                work.wait()
            self._free_sent(source, self.route.produced_at[source][message])
        return x

    def close(self) -> None:
        for other in self.in_flight:
            self._free_sent(other)

    def _free_sent(self, target: int, place: float = math.inf) -> None:
        """Frees messages that the target has consumed before `place`.

        A message that the target computed there proves it, long before gloo completes the send.
        """
        for used, _, work in self.in_flight[target]:
            if used <= place and work is not None:
                with comm_range("pp", "wait"):
                    work.wait()
        self.in_flight[target] = [one for one in self.in_flight[target] if one[0] > place]


class Pipeline:
    """Runs the chunks of one rank in the order of the schedule."""

    def __init__(
        self,
        chunks: Sequence[StageChunk],
        schedule: Schedule,
        mesh: Mesh,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        scales: Float8GatherScales | None = None,
        losses: int = 1,
    ) -> None:
        """`losses`: of how many parts the loss of a step is, cross-entropy, z-loss and that of multi-token prediction."""
        self.losses = (losses,) if losses > 1 else ()
        self.mesh, self.schedule, self.scales = mesh, schedule, scales
        self.rank = mesh.pp.rank
        self.chunks = {chunk.stage: chunk for chunk in chunks}
        self.routes = {schedule.microbatches: StageRoutes(schedule, schedule.actions)}
        """by the number of micro-batches, which grows in a batch-size ramp"""
        self.links = PipelineLinks(mesh, shape, dtype)
        self.last_stage = schedule.stages - 1
        self.ran: list[Action] = []
        """the actions of the last step, in order"""
        self.microbatch: int | None = None
        """the micro-batch whose forward is running; None outside of a forward, including during recomputation"""

    def step(self, batch: Batch, scale: torch.Tensor) -> torch.Tensor:
        """Runs one step, forward and backward; returns the sums of this rank's losses. `scale` [] weighs each token's loss."""
        self.links.begin(batch)
        route = self._route(len(batch.microbatches))
        actions = route.actions[self.rank]
        split_stages = {action.stage for action in actions if action.kind is ActionKind.W}
        last_of = {action.stage: place for place, action in enumerate(actions) if action.kind in (ActionKind.B, ActionKind.W)}
        mailbox = _StageMailbox(route, self.rank, self.links, self.mesh.clock)
        saved: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # input and output of a stage
        pending: dict[tuple[int, int], list[Callable[[], None]]] = {}
        total = torch.zeros(self.losses, device=self.mesh.device)
        self.ran = []
        self._update_scales()
        for chunk in self.chunks.values():
            chunk.gradients.begin()
        for place, action in enumerate(actions):
            chunk, key = self.chunks[action.stage], (action.stage, action.microbatch)
            last, split = place == last_of[action.stage], action.stage in split_stages
            with profile_range(PASSES[action.kind], "stage", action.stage, "micro-batch", action.microbatch):
                if action.kind is ActionKind.F:
                    saved[key] = self._forward(chunk, action, batch, mailbox)
                    if action.stage == self.last_stage:
                        total += saved[key][1].detach()
                elif action.kind is ActionKind.W:
                    _run_deferred(pending.pop(key))
                    chunk.gradients.after_backward(last, split)
                else:
                    chunk.deferred.open = action.kind is ActionKind.I
                    chunk.gradients.before_backward(last, split)
                    self._backward(action, *saved.pop(key), scale, mailbox)
                    chunk.deferred.open = False
                    if action.kind is ActionKind.I:
                        pending[key] = chunk.deferred.pop()
                    else:
                        chunk.gradients.after_backward(last, split)
            self.ran.append(action)
        mailbox.close()
        for chunk in self.chunks.values():
            chunk.gradients.finish()
        return total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Runs all forwards; returns the sum of this rank's cross-entropy of next tokens."""
        self.links.begin(batch)
        route = forwards_only(self.schedule)
        mailbox = _StageMailbox(route, self.rank, self.links, self.mesh.clock)
        total = torch.zeros((), device=self.mesh.device)
        self._update_scales()
        for action in route.actions[self.rank]:
            y = self._forward(self.chunks[action.stage], action, batch, mailbox)[1]
            if action.stage == self.last_stage:
                total += y.view(-1)[0]
        mailbox.close()
        return total

    def _route(self, microbatches: int) -> StageRoutes:
        if microbatches not in self.routes:
            known = self.schedule
            schedule = build(known.name, known.ranks, microbatches, known.virtual_stages)
            self.routes[microbatches] = StageRoutes(schedule, schedule.actions)
        return self.routes[microbatches]

    def _update_scales(self) -> None:
        """Weights may have changed since the last forwards."""
        if self.scales is not None:
            self.scales.update()

    def _forward(
        self, chunk: StageChunk, action: Action, batch: Batch, mailbox: _StageMailbox
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stage, k = action.stage, action.microbatch
        x, targets, *documents = batch.microbatches[k]
        ahead = {"ahead": documents.pop()} if batch.has_ahead else {}
        if stage > 0:
            x = mailbox.receive(StageMessage(ActionKind.F, stage - 1, k), self.schedule.rank_of(stage - 1)).requires_grad_(
                torch.is_grad_enabled()
            )
        self.microbatch = k
        wanted = {"targets": targets, **ahead} if stage == self.last_stage else {}
        y = chunk.gradients.module(x, batch.positions, documents=documents[0] if documents else None, **wanted)
        self.microbatch = None
        target = mailbox.route.target(Action(ActionKind.F, stage, k))
        if target is not None:
            mailbox.send(StageMessage(ActionKind.F, stage, k), y.detach(), target)
        return x, y

    def _backward(self, action: Action, x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor, mailbox: _StageMailbox) -> None:
        stage, k = action.stage, action.microbatch
        if stage == self.last_stage:
            grad = scale.to(y.dtype).expand_as(y)
        else:
            grad = mailbox.receive(StageMessage(ActionKind.B, stage + 1, k), self.schedule.rank_of(stage + 1))
        with torch.autograd.set_multithreading_enabled(False):  # faster, see benchmarks/gpu/README.md
            torch.autograd.backward(y, grad)
        target = mailbox.route.target(action)
        if target is not None:
            assert x.grad is not None
            mailbox.send(_message(action), x.grad, target)


def _run_deferred(pending: list[Callable[[], None]]) -> None:
    """Runs deferred weight gradients in order and frees each one's tensors as soon as it has run."""
    pending.reverse()
    while pending:
        pending.pop()()
