"""Builds the action lists of every schedule, action for action those of torch.distributed.pipelining 2.13.

Equality with torch is what lets the engine run exactly what the planner simulated; a test holds it. Where torch has a
peculiarity (rounds that stretch beyond the number of ranks, micro-batches struck from a longer ZB-V) it is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache

from ultrascale.schedules.actions import Action, Kind, Schedule
from ultrascale.schedules.legal import legal, rounds
from ultrascale.specs.errors import SpecError

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741 - the papers' letters


@lru_cache(maxsize=256)
def build(name: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """The schedule `name` (one of `SCHEDULES`) for so many ranks, micro-batches and stages per rank."""
    problem = legal(name, ranks, microbatches, virtual_stages)
    if problem is not None:
        raise SpecError(problem)
    one_rank = _BUILDERS[name]
    actions = tuple(tuple(one_rank(ranks, rank, microbatches, virtual_stages)) for rank in range(ranks))
    return Schedule(name, ranks, virtual_stages, microbatches, actions)


def _afab(ranks: int, rank: int, microbatches: int, virtual_stages: int) -> list[Action]:
    """All forwards, then all backwards (Huang 2019, GPipe)."""
    return [Action(kind, rank, k) for kind in (F, B) for k in range(microbatches)]


def _1f1b(ranks: int, rank: int, microbatches: int, virtual_stages: int) -> list[Action]:
    """Forwards until the first gradient can be back, then one forward, one backward (Narayanan 2019, 2021)."""
    warmup = min(ranks - 1 - rank, microbatches)
    actions = [Action(F, rank, k) for k in range(warmup)]
    for k in range(warmup, microbatches):
        actions += (Action(F, rank, k), Action(B, rank, k - warmup))
    actions += (Action(B, rank, k) for k in range(microbatches - warmup, microbatches))
    return actions


def _interleaved(ranks: int, rank: int, microbatches: int, virtual_stages: int) -> list[Action]:
    """1F1B over several stages per rank (Narayanan 2021): micro-batches pass in rounds, all stages within a round."""
    per_round = microbatches // rounds(ranks, microbatches)
    chunks = microbatches * virtual_stages
    # Two more for every rank further from the loss: a forward and a backward hop. Narayanan 2021, section 2.2.
    warmup = min((virtual_stages - 1) * per_round + 2 * (ranks - 1 - rank), chunks)
    actions: list[Action] = []
    for step in range(chunks + warmup):
        if step < chunks:
            actions.append(_looped(F, ranks, rank, per_round, virtual_stages, step))
        if step >= warmup:
            actions.append(_looped(B, ranks, rank, per_round, virtual_stages, step - warmup))
    return actions


def _zero_bubble(ranks: int, rank: int, microbatches: int, virtual_stages: int) -> list[Action]:
    """ZB-H1 of Qi 2023 (one stage per rank) and its interleaved form: weight gradients fill the bubble at the end."""
    per_round = microbatches // rounds(ranks, microbatches)
    chunks = microbatches * virtual_stages
    # One per hop, not two: the gradient comes back without waiting for weight gradients on its way.
    warmup = min((virtual_stages - 1) * per_round + (ranks - 1 - rank), chunks)
    actions: list[Action] = []
    for step in range(chunks + warmup + rank):
        if step < chunks:
            actions.append(_looped(F, ranks, rank, per_round, virtual_stages, step))
        if warmup <= step < chunks + warmup:
            actions.append(_looped(I, ranks, rank, per_round, virtual_stages, step - warmup))
        if step >= warmup + rank:  # rank r runs r weight gradients late: as many as it must wait for at the end
            actions.append(_looped(W, ranks, rank, per_round, virtual_stages, step - warmup - rank))
    return actions


def _looped(kind: Kind, ranks: int, rank: int, per_round: int, virtual_stages: int, n: int) -> Action:
    """The n-th forward (or backward) of a looped rank: a round of micro-batches on one stage, then on the next."""
    turn, place = divmod(n, per_round)
    round_, chunk = divmod(turn, virtual_stages)
    if kind is not F:
        chunk = virtual_stages - 1 - chunk
    return Action(kind, chunk * ranks + rank, round_ * per_round + place)


def _zb_v(ranks: int, rank: int, microbatches: int, virtual_stages: int) -> list[Action]:
    """ZB-V (Qi 2024): stages in a V, so that the rank with the loss is the rank with the embedding; memory of 1F1B."""
    # Torch builds the list for enough micro-batches to fill the V and strikes those that do not exist.
    full = max(2 * ranks - 1, microbatches)
    push = _Counter(down=rank, up=2 * ranks - 1 - rank)
    for _ in range(2 * (ranks - rank) - 1):
        push(F, "down")
    for _ in range(rank):
        push(F, "up")
        push(F, "down")
    for _ in range(ranks - rank):
        push(F, "up")
        push(I, "up")
        push(W, "up")
    while push.count(F, "up") < full:
        if push.count(F, "down") < full:
            push(F, "down")
        push(I, "down")
        push(W, "down")
        push(F, "up")
        push(I, "up")
        push(W, "up")
    for _ in range(rank):
        push(I, "down")
        push(I, "up")
    for _ in range(ranks - rank):
        push(I, "down")
        push(W, "down")
    while push.count(W, "up") < full:
        push(W, "up")
    while push.count(W, "down") < full:
        push(W, "down")
    return [action for action in push.actions if action.microbatch < microbatches]


def _dualpipe_v(ranks: int, rank: int, microbatches: int, virtual_stages: int) -> list[Action]:
    """DualPipe (DeepSeek-V3, 2024) cut to a V (Sea AI Lab): forwards run paired with backwards to hide traffic."""
    push = _Counter(down=rank, up=2 * ranks - 1 - rank)
    ahead = ranks - 1 - rank
    for _ in range(2 * ahead):
        push(F, "down")
    for _ in range(rank + 1):
        push(F, "down")
        push(F, "up")
    for _ in range(ahead):
        push(I, "up")
        push.pending_w()
        push(F, "up")
    for i in range(microbatches - 2 * ranks + rank + 1):
        # The last rank's first pair is left apart: its backward needs the forward just before it, on the same rank.
        push(F, "down", paired=not (i == 0 and rank == ranks - 1))
        push(B, "up")
        push(F, "up", paired=True)
        push(B, "down")
    for _ in range(ahead):
        push(B, "up")
        push(F, "up", paired=True)
        push(B, "down")
    # In the second half of the drain weight gradients are put off, to fill the bubble at the very end.
    for i in range(2 * (rank + 1)):
        push(B if i <= rank else I, "down" if i % 2 else "up")
    for _ in range(ahead):
        push.pending_w()
        push(I, "down")
    while push.waiting:
        push.pending_w()
    return push.actions


class _Counter:
    """Appends actions of a V-shaped rank, counting micro-batches per kind and way (down to or up from the fold)."""

    def __init__(self, down: int, up: int) -> None:
        self.actions: list[Action] = []
        self.waiting: deque[tuple[int, int]] = deque()  # (stage, micro-batch) whose weight gradient is owed
        self._stage = {"down": down, "up": up}
        self._next: dict[tuple[Kind, str], int] = {}

    def __call__(self, kind: Kind, way: str, paired: bool = False) -> None:
        counted = I if kind is B else kind  # a full backward takes its turn among the input gradients
        k = self.count(counted, way)
        self._next[counted, way] = k + 1
        self.actions.append(Action(kind, self._stage[way], k, paired))
        if kind is I:
            self.waiting.append((self._stage[way], k))

    def count(self, kind: Kind, way: str) -> int:
        return self._next.get((kind, way), 0)

    def pending_w(self) -> None:
        """The oldest weight gradient owed, if there is one."""
        if self.waiting:
            self.actions.append(Action(W, *self.waiting.popleft()))


_BUILDERS: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "afab": _afab,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
    "zb-v": _zb_v,
    "dualpipe-v": _dualpipe_v,
}
