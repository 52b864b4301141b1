"""Parameters that DeepSpeed's ZeRO-3 gathers in a micro-batch, and those that are gathered at once.

It gathers parameter by parameter, a module's when it is called, and ahead of these the next of the order that it recorded, in
buckets and up to a number of live ones. A parameter is freed after use unless a prefetch has passed over its next use while it
was there, or little is used before that (runtime/zero/partitioned_param_coordinator.py, 0.19). Where the prefetches are when
forward turns into backward thus decides what is gathered twice. They depend on sizes of parameters in their order alone, so a
micro-batch is followed once for each model, tp and recomputation; layouts that differ in anything else share the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.cost.memory.states import on_tp_rank
from ultrascale.specs import weights
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.job import Job
from ultrascale.specs.model import Model
from ultrascale.specs.weights import WeightShape

# Elements, by DeepSpeed's defaults; its stage3_max_live_parameters is a field of the Framework.
PREFETCH_BUCKET = 50_000_000  # stage3_prefetch_bucket_size
REUSE_DISTANCE = 1_000_000_000  # stage3_max_reuse_distance: what is used again before so many is kept
PERSISTENT = 100_000  # stage3_param_persistence_threshold: a parameter so small is gathered once a step


@dataclass(frozen=True)
class GatheredElements:
    """Of one rank, per row."""

    each_microbatch: Array
    each_step: Array
    """small ones, which stay"""
    live_at_loss: Array
    live_in_last_layer: Array
    """in its backward"""
    live_before: Array
    """in the backward of the layers before it"""


def gathered_elements(job: Job, columns: LayoutColumns) -> GatheredElements:
    rows, of_row = columns.distinct(("tp", "recompute"))
    full = rows.is_("recompute", "full")
    found = [_of_tp_rank(job, rows.take(slice(row, row + 1)), bool(full[row])) for row in range(len(rows))]
    return GatheredElements(*np.asarray(found)[of_row].T)


Module = tuple[int, ...]
"""sizes of a module's own parameters, then the numbers of these"""
Group = tuple[Module, ...]
"""a module and the modules in it: forward in this order, backward the module and then the others from the last to the first"""


def _of_tp_rank(job: Job, row: LayoutColumns, recomputes: bool) -> tuple[float, ...]:
    model = job.model

    def sizes(shapes: Iterable[WeightShape]) -> Module:
        return tuple(round(float(on_tp_rank([shape], model, row)[0])) for shape in shapes)

    kinds = {kind: tuple(_layer(model, kind, sizes)) for kind in model.layer_kinds}
    vocabulary, norm = sizes([weights.vocabulary(model)]), sizes([weights.norm(model)])
    layers = tuple(kinds[kind] for kind in model.each_kind)
    return _microbatch(vocabulary, layers, norm, model.tied_embeddings, recomputes, int(job.framework.live_parameters))


def _layer(model: Model, kind: LayerKind, sizes: Callable[[Iterable[WeightShape]], Module]) -> Iterator[Group]:
    """Modules of a layer of transformers: one for each matrix, and those without parameters, which prefetch too. Vectors are
    small enough to stay, wherever they are.
    """
    shapes = weights.layer_weights(model, kind)
    vectors = tuple(shape for shape in shapes if min(shape.rows, shape.width) == 1 or shape == weights.norm(model))
    yield ((),)
    yield (sizes(vectors),)
    if kind.mixer != "none":
        matrices = [sizes([shape]) for shape in weights.mixer(model, kind) if shape not in vectors]
        norms: list[Module] = [()] * (model.qk_norm and kind.mixer == "attention")
        yield ((), matrices[0], *norms, matrices[1], *norms, *matrices[2:])
        yield ((),)
    if kind.mlp == "dense":
        *inner, output = (sizes([shape]) for shape in weights.mlp(model, model.ffn) if shape not in vectors)
        yield ((), inner[0], (), *inner[1:], output)
    elif model.moe is not None and kind.mlp == "moe":
        experts = sizes(shape for shape in weights.mlp(model, model.moe.expert_ffn) if shape not in vectors)
        shared = [sizes([shape]) for shape in weights.shared_expert(model) if shape not in vectors]
        yield ((), sizes(weights.router(model)), tuple(model.moe.experts * size for size in experts), *shared)


@lru_cache(maxsize=256)
def _microbatch(
    vocabulary: Module, layers: tuple[tuple[Group, ...], ...], norm: Module, tied: bool, recomputes: bool, most_live: int
) -> tuple[float, ...]:
    """The fields of GatheredElements."""
    sizes: list[int] = []

    def numbered(module: Module) -> Module:
        sizes.extend(module)
        return tuple(range(len(sizes) - len(module), len(sizes)))

    embedding = numbered(vocabulary)
    blocks = [tuple(tuple(map(numbered, group)) for group in groups) for groups in layers]
    final = numbered(norm)
    head = embedding if tied else numbered(vocabulary)
    # The whole model, its decoder and its rotary embeddings have no parameters of their own.
    forward = [(), (), embedding, (), *(module for block in blocks for group in block for module in group), final, head]
    calls = [Call(module) for module in [*forward, (), head, (), final]]
    layers_backward = [_backward(block, recomputes) for block in reversed(blocks)]
    for backward in layers_backward:
        calls += backward
    gathered, live = _simulate([*calls, Call(embedding)], sizes, most_live)
    stay = sum(size for size in sizes if size <= PERSISTENT)
    at_loss, begin = len(forward) + 1, len(forward) + 4
    before = begin + len(layers_backward[0])
    return gathered, stay, *(stay + max(each) for each in (live[at_loss:begin], live[begin:before], live[before:]))


class Call(NamedTuple):
    parameters: Module
    frees: bool = True
    """those of its parameters afterwards that are not used soon"""


def _backward(block: Sequence[Group], recomputes: bool) -> list[Call]:
    """Of a layer, whose forward runs again when the first tensor that it saved is asked for: by its last matrix."""
    (layer, *_), *groups = block
    calls = [Call(layer)]
    for outer, *inner in reversed(groups):
        calls += map(Call, [outer, *reversed(inner)])
    if not recomputes:
        return calls
    first = next(number for number, call in enumerate(calls) if call.parameters)
    again = [Call(module) for group in block for module in group]
    return [*calls[:first], Call(calls[first].parameters, frees=False), *again, *calls[first + 1 :]]


def _simulate(calls: list[Call], sizes: list[int], most_live: int) -> tuple[int, list[int]]:
    """Elements gathered, and those live after each call has gathered; small ones, which stay, left out."""
    before = [0, *accumulate(sum(sizes[one] for one in call.parameters) for call in calls)]
    next_uses, upcoming = [], [len(calls)] * len(sizes)
    for number in range(len(calls) - 1, -1, -1):
        next_uses.append([upcoming[one] for one in calls[number].parameters])
        for one in calls[number].parameters:
            upcoming[one] = number
    order = [(one, number) for number, call in enumerate(calls) for one in call.parameters]
    there = [size <= PERSISTENT for size in sizes]
    fetched_for = [-1] * len(sizes)  # the last call of which a prefetch knows that it has the parameter
    position = gathered = live = 0
    lives = []

    def gather(one: int) -> int:
        """Its elements, unless they are there."""
        size = 0 if there[one] else sizes[one]
        there[one] = True
        return size

    for number, call in enumerate(calls):
        own = sum(map(gather, call.parameters))
        for _ in range(sum(fetched_for[one] < number for one in call.parameters)):
            fetched_for[order[position][0]] = order[position][1]
            position += 1
        ahead, most = 0, min(most_live - live - own, PREFETCH_BUCKET)
        while position < len(order) and ahead < most:
            one, use = order[position]
            fetched_for[one] = max(fetched_for[one], use)
            ahead += gather(one)
            position += 1
        gathered, live = gathered + own + ahead, live + own + ahead
        lives.append(live)
        for one, use in zip(call.parameters, next_uses[-1 - number], strict=True) if call.frees else ():
            soon = use < len(calls) and before[use] - before[number + 1] < REUSE_DISTANCE
            if there[one] and sizes[one] > PERSISTENT and fetched_for[one] <= number + 1 and not soon:
                there[one], live = False, live - sizes[one]
    return gathered, lives
