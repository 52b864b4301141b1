"""Muon (Jordan 2024): momentum of matrices, orthogonalised by Newton–Schulz iterations, as torch.optim.Muon has it.

A matrix has to be whole for that, and is cut by ZeRO and tensor parallelism. Matrices are dealt to the ranks that hold parts of
them (cost/muon.py): each rank gathers its own, orthogonalises them and scatters the results, while the next ones are gathered.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ultrascale.cost import muon as law
from ultrascale.parallel import comm
from ultrascale.parallel.comm import AsyncCollective, Axis
from ultrascale.parallel.mesh import Mesh
from ultrascale.specs.job import Job
from ultrascale.specs.training import MuonScale, Training

if TYPE_CHECKING:
    from ultrascale.train.optimizer import Weight

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the quintic: Jordan's, with a large slope at zero
EPS = 1e-7
MOMENTUM = "momentum_buffer"


def newton_schulz(matrices: Tensor) -> Tensor:
    """[rows, width] or [n, rows, width], overwritten: close to the orthogonal factors, with singular values near 1."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    multiply, add = (torch.mm, torch.addmm) if x.dim() == 2 else (torch.bmm, torch.baddbmm)
    x.div_(x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS))
    gram, square = (x.new_empty(*x.shape[:-1], x.shape[-2]) for _ in range(2))
    following = torch.empty_like(x)
    for _ in range(law.STEPS):
        multiply(x, x.mT, out=gram)
        add(gram, gram, gram, beta=b, alpha=c, out=square)
        add(x, square, x, beta=a, out=following)
        x, following = following, x
    return x.mT if tall else x


def update_scale(rule: MuonScale, rows: int, width: int) -> float:
    """What an orthogonalised update is multiplied by, as torch.optim.Muon's `adjust_lr_fn` has it."""
    return 0.2 * math.sqrt(max(rows, width)) if rule == "match_rms_adamw" else math.sqrt(max(1, rows / width))


@dataclass(frozen=True)
class Rectangle:
    """Rows and columns of a matrix that one rank holds."""

    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Matrix:
    """A matrix of the model: a weight, or one expert's slice of it."""

    weight: Weight
    expert: int | None
    """among those of this rank's ep index"""
    tp: int
    """ranks of tensor parallelism"""
    ep: int

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self.weight.shard.shape[-2:]
        return rows, width

    @property
    def dim(self) -> int:
        """What tp cuts: 0 rows, 1 columns; 0 if nothing."""
        shard = self.weight.shard
        return 0 if shard.dim is None else shard.dim - len(shard.shape) + 2

    @property
    def parts(self) -> int:
        """Different parts that tp ranks hold."""
        shard = self.weight.shard
        return 1 if shard.dim is None else shard.shape[shard.dim] // shard.length

    @property
    def cut(self) -> str:
        """As the tables of specs/weights.py name it, where tp cuts."""
        path = self.weight.shard.name.split(".")
        if path[-3:-1] in (["qkv", "k"], ["qkv", "v"]):
            return "kv rows"
        return "none" if self.weight.shard.dim is None else ("rows", "width")[self.dim]

    def rectangle(self, rank: int) -> Rectangle:
        """Of a rank of the stage's copy: tp ranks of ZeRO's first shard, then of the next."""
        piece, place = divmod(rank, self.tp)
        ends = [slice(0, size) for size in self.shape]
        length = self.shape[self.dim] // self.parts
        start = place * self.parts // self.tp * length
        ends[self.dim] = slice(start, start + length)
        rows, columns = ends
        first, last = self._zero_rows(piece, rows.stop - rows.start)
        return Rectangle(slice(rows.start + first, rows.start + last), columns)

    def _zero_rows(self, piece: int, rows: int) -> tuple[int, int]:
        """Of `rows` those in a piece of ZeRO: chunked as torch.chunk does."""
        shard = self.weight.shard
        if shard.pieces is None:
            return 0, rows
        if self.expert is None:
            each = -(-rows // shard.pieces.size)
            return min(piece * each, rows), min((piece + 1) * each, rows)
        if shard.rows is not None:
            piece, other = divmod(piece, self.ep)
            if other != self.ep_rank:
                return 0, 0
        first, last = self._slices(piece)
        return first * rows // shard.slices, last * rows // shard.slices

    def _slices(self, piece: int) -> tuple[int, int]:
        """Slices of this expert that a piece of the stacked slices of all experts has."""
        shard, begin = self.weight.shard, self._stored_slices(piece)
        assert self.expert is not None
        whole = range(self.expert * shard.slices, (self.expert + 1) * shard.slices)
        first, last = max(begin.start, whole.start), min(begin.stop, whole.stop)
        return (first - whole.start, last - whole.start) if first < last else (0, 0)

    def _stored_slices(self, piece: int) -> range:
        shard = self.weight.shard
        count = (shard.shape[0] if shard.rows is None else shard.rows[1]) * shard.slices
        if shard.pieces is None:
            return range(count)
        each = -(-count // shard.pieces.size)
        return range(min(piece * each, count), min((piece + 1) * each, count))

    @property
    def ep_rank(self) -> int:
        assert self.weight.shard.rows is not None
        return self.weight.shard.rows[0] // self.weight.shard.rows[1]

    def view(self, tensor: Tensor) -> Tensor:
        """This rank's part of the matrix, of the weight's local values, gradient or momentum."""
        if self.expert is None:
            return tensor
        shard = self.weight.shard
        stored = self._stored_slices(0 if shard.pieces is None else shard.pieces.rank)
        begin = self.expert * shard.slices
        own = range(max(begin, stored.start), min(begin + shard.slices, stored.stop))
        return tensor[own.start - stored.start : own.stop - stored.start].flatten(0, 1)

    def sender(self, rank: int, owner: int) -> bool:
        """Whether a rank sends its part to the owner: of tp ranks with the same part one does."""
        alike, place, target = self.tp // self.parts, rank % self.tp, owner % self.tp
        near = place // alike == target // alike
        return place == (target if near else place // alike * alike + target % alike)


@dataclass(frozen=True)
class Exchange:
    """What this rank does in a round."""

    copies: Axis
    sent: list[Matrix]
    """whose parts it sends, by the rank that orthogonalises them"""
    owned: list[Matrix]
    """which it orthogonalises"""
    gathers: tuple[list[int], list[int]] | None
    """elements sent to and received from each rank of the stage's copy; None: matrices are whole"""
    scatters: tuple[list[int], list[int]] | None
    results: list[list[Matrix]]
    """by copy of the stage, in the order in which results are scattered"""
    rank: int
    ranks: int

    @property
    def padded(self) -> int:
        """Elements of the results of the copy that has the most."""
        return max(sum(one.rectangle(self.rank).elements for one in copy) for copy in self.results)


class Muon:
    """Steps hidden matrices; AdamW steps all other weights."""

    def __init__(self, weights: Sequence[Weight], job: Job, training: Training, mesh: Mesh) -> None:
        self.weights, self.training, self.mesh = list(weights), training, mesh
        self.state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        self.dtype = torch.float32 if job.precision == "fp32" else torch.bfloat16
        self.exchanges = [*self._of_dense(), *self._of_experts()]

    def _matrix(self, weight: Weight, expert: int | None = None) -> Matrix:
        return Matrix(weight, expert, self.mesh.tp.size, self.mesh.ep.size)

    def _of_dense(self) -> Iterator[Exchange]:
        found = [self._matrix(weight) for weight in self.weights if len(weight.shard.shape) == 2]
        found.sort(key=lambda one: (law.order(*one.shape), one.cut))
        sizes = [(math.prod(one.shape), 1) for one in found]
        yield from self._dealt(found, list(range(self.mesh.stage.size)), self.mesh.copies, sizes)

    def _of_experts(self) -> Iterator[Exchange]:
        stacks = [self._matrix(weight, 0) for weight in self.weights if len(weight.shard.shape) == 3]
        if not stacks:
            return
        stacks.sort(key=lambda one: (law.order(*one.shape), one.cut))
        shard = stacks[0].weight.shard
        experts = shard.shape[0] if shard.rows is None else shard.rows[1]
        pieces = 1 if shard.pieces is None else shard.pieces.size
        most = max(1, -(-experts * shard.slices // pieces) // shard.slices)
        rank, members, found = self.mesh.stage.rank, [self.mesh.stage.rank], list[Matrix]()
        for stack in stacks:
            for expert in range(experts):
                one = self._matrix(stack.weight, expert)
                if one.rectangle(rank).elements:
                    found.append(one)
                    members = [other for other in range(self.mesh.stage.size) if one.rectangle(other).elements]
        sizes = [(math.prod(one.shape), most) for one in stacks]
        yield from self._dealt(found, members, self.mesh.expert_copies, sizes)

    def _dealt(
        self, matrices: list[Matrix], members: list[int], copies: Axis, sizes: Sequence[tuple[int, int]]
    ) -> Iterator[Exchange]:
        """Deals the matrices to the members of each copy of the stage."""
        rank, everyone = self.mesh.stage.rank, range(self.mesh.stage.size)
        turn = copies.size * len(members)
        for begin, end in law.rounds(sizes, turn):
            dealt: list[list[tuple[int, Matrix]]] = [[] for _ in range(copies.size)]
            for position, one in enumerate(matrices[begin:end], begin):
                place, copy = divmod(position % turn, copies.size)
                dealt[copy].append((members[place], one))
            for pairs in dealt:
                pairs.sort(key=lambda pair: pair[0])  # stable: matrices of a rank stay in order
            here = dealt[copies.rank]
            sent = [(owner, one) for owner, one in here if one.rectangle(rank).elements and one.sender(rank, owner)]
            owned = [one for owner, one in here if owner == rank]
            cut = any(len(members) > 1 and _is_cut(one, members) for one in matrices[begin:end])
            gathers = scatters = None
            if cut:
                received = [sum(one.rectangle(q).elements for one in owned if one.sender(q, rank)) for q in everyone]
                gathers = [sum(one.rectangle(rank).elements for owner, one in sent if owner == q) for q in everyone], received
            if len(members) > 1:
                results = [sum(one.rectangle(q).elements for one in owned) for q in everyone]
                own = [sum(one.rectangle(rank).elements for owner, one in here if owner == q) for q in everyone]
                scatters = results, own
            by_copy = [[one for _, one in pairs] for pairs in dealt]
            yield Exchange(copies, [one for _, one in sent], owned, gathers, scatters, by_copy, rank, self.mesh.stage.size)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for weight in self.weights:
            if (momentum := self.state[weight.master].get(MOMENTUM)) is None:
                momentum = self.state[weight.master][MOMENTUM] = torch.zeros_like(weight.master)
            momentum.lerp_(weight.gradient.to(momentum), 1 - self.training.muon_momentum)
        running: list[Iterator[None]] = []
        for exchange in self.exchanges:
            running.append(self._run(exchange, learning_rate))
            running = _advance(running)
        while running:
            running = _advance(running)

    def _run(self, exchange: Exchange, learning_rate: float) -> Iterator[None]:
        """One round; each `yield` leaves a collective running while other rounds go on."""
        gathering = self._gather(exchange)
        yield
        wholes = gathering if isinstance(gathering, list) else self._wholes(exchange, gathering.wait())
        del gathering  # and what was received
        scattering = self._scatter(exchange, _orthogonalized(wholes))
        yield
        flat = scattering.wait()
        del scattering
        if exchange.copies.size > 1:
            flat = torch.nn.functional.pad(flat, (0, exchange.padded - len(flat)))
        copying = comm.all_gather_start(flat, exchange.copies)
        del flat
        yield
        self._apply(exchange, copying.wait().view(exchange.copies.size, -1), learning_rate)

    def _gather(self, exchange: Exchange) -> AsyncCollective[Tensor] | list[Tensor]:
        updates = [self._update(one) for one in exchange.sent]
        if exchange.gathers is None:
            return updates
        flat = torch.cat([self._empty(), *(one.flatten() for one in updates)])
        return comm.all_to_all_rows_start(flat, self.mesh.stage, *exchange.gathers)

    def _update(self, one: Matrix) -> Tensor:
        """Nesterov's, of this rank's part."""
        momentum = one.view(self.state[one.weight.master][MOMENTUM])
        gradient = one.view(one.weight.gradient).to(momentum)
        return gradient.lerp(momentum, self.training.muon_momentum).to(self.mesh.device, self.dtype)

    def _empty(self) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.mesh.device)

    @staticmethod
    def _wholes(exchange: Exchange, flat: Tensor) -> list[Tensor]:
        """The owned matrices, from the parts that came in the order of ranks."""
        parts: list[dict[int, list[Tensor]]] = [{} for _ in exchange.owned]
        offset = 0
        for rank in range(exchange.ranks):
            for one, received in zip(exchange.owned, parts, strict=True):
                rectangle = one.rectangle(rank)
                if rectangle.elements and one.sender(rank, exchange.rank):
                    piece = flat[offset : offset + rectangle.elements].view(rectangle.shape)
                    received.setdefault(rank % one.tp, []).append(piece)
                    offset += rectangle.elements
        return [
            torch.cat([torch.cat(received[part]) for part in sorted(received)], one.dim)
            for one, received in zip(exchange.owned, parts, strict=True)
        ]

    def _scatter(self, exchange: Exchange, results: list[Tensor]) -> AsyncCollective[Tensor]:
        pieces = results
        if exchange.scatters is not None:
            pairs = list(zip(exchange.owned, results, strict=True))
            rectangles = [(one.rectangle(rank), whole) for rank in range(exchange.ranks) for one, whole in pairs]
            pieces = [whole[rectangle.rows, rectangle.columns] for rectangle, whole in rectangles]
        flat = torch.cat([self._empty(), *(piece.flatten() for piece in pieces)])
        if exchange.scatters is None:
            return comm.completed(flat, self.mesh.stage)
        return comm.all_to_all_rows_start(flat, self.mesh.stage, *exchange.scatters)

    def _apply(self, exchange: Exchange, flats: Tensor, learning_rate: float) -> None:
        training = self.training
        for matrices, flat in zip(exchange.results, flats, strict=True):
            offset = 0
            for one in matrices:
                rectangle, master = one.rectangle(exchange.rank), one.view(one.weight.master)
                update = flat[offset : offset + rectangle.elements].view(rectangle.shape)
                offset += rectangle.elements
                scale = update_scale(training.muon_scale, *one.shape)
                master.mul_(1 - learning_rate * training.weight_decay).add_(
                    update.to(master.device), alpha=-learning_rate * scale
                )


def _orthogonalized(wholes: list[Tensor]) -> list[Tensor]:
    """Those of one shape together. The list is emptied, so that a stack and the matrices in it are not both live for long."""
    found = list[Tensor]()
    while wholes:
        alike = [wholes.pop(0)]
        while wholes and wholes[0].shape == alike[0].shape:
            alike.append(wholes.pop(0))
        if len(alike) == 1:
            found.append(newton_schulz(alike.pop()))
            continue
        stack = torch.stack(alike)
        alike.clear()
        found += newton_schulz(stack).unbind()
    return found


def _is_cut(one: Matrix, members: Sequence[int]) -> bool:
    """Whether no member has all of the matrix."""
    return one.rectangle(members[0]).elements < math.prod(one.shape)


def _advance(running: list[Iterator[None]]) -> list[Iterator[None]]:
    """Lets every round go on to its next collective, the last one first: it gathers while the one before computes."""
    return [one for one in reversed(running) if next(one, running) is not running][::-1]
