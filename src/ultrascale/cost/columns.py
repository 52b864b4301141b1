"""Tables with a row per layout, pipeline rank or chunk: every law is written once and serves one layout or a million."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from ultrascale.schedules import REGISTRY, SCHEDULES
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.layout import ContextParallel, DataParallel, Dispatcher, Layout, Offload, Recompute
from ultrascale.specs.model import Model

Array = npt.NDArray[Any]
AnyTable = TypeVar("AnyTable")
NOTHING: Any = np.float64(0.0)  # in every row of a table

CHOICES: dict[str, tuple[str, ...]] = {
    "schedule": SCHEDULES,
    "data_parallel": get_args(DataParallel),
    "context_parallel": get_args(ContextParallel),
    "recompute": get_args(Recompute),
    "offload": get_args(Offload),
    "dispatcher": get_args(Dispatcher),
}


@dataclass(frozen=True)
class LayoutColumns:
    """One array per field of the Layout; words are stored as their index in CHOICES; 0 etp,
    zero_shards or recompute_layers are null."""

    dp: Array
    tp: Array
    pp: Array
    cp: Array
    ep: Array
    etp: Array
    zero: Array
    zero_shards: Array
    keep_gathered: Array
    sequence_parallel: Array
    data_parallel: Array
    context_parallel: Array
    schedule: Array
    virtual_stages: Array
    mbs: Array
    gas: Array
    recompute: Array
    recompute_layers: Array
    offload: Array
    dispatcher: Array

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> LayoutColumns:
        return cls.from_mapping({name: [encode(name, getattr(one, name)) for one in layouts] for name in NAMES})

    @classmethod
    def from_mapping(cls, columns: Mapping[str, Any]) -> LayoutColumns:
        return cls(**{name: np.asarray(columns[name], dtype=np.int64) for name in NAMES})

    @classmethod
    def joined(cls, parts: Sequence[LayoutColumns]) -> LayoutColumns:
        """The rows of one table after those of another."""
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in NAMES})

    def __len__(self) -> int:
        return len(self.dp)

    def take(self, index: Array | slice) -> LayoutColumns:
        return LayoutColumns(**{name: getattr(self, name)[index] for name in NAMES})

    def changed(self, **columns: Array) -> LayoutColumns:
        return replace(self, **columns)

    def layout(self, row: int) -> Layout:
        """The row as a Layout; its values were made from one or checked by the enumeration, so they are not checked again."""
        return Layout.model_construct(**{name: decode(name, int(getattr(self, name)[row])) for name in NAMES})

    def is_(self, field: str, word: str) -> Array:
        return np.asarray(getattr(self, field) == CHOICES[field].index(word))

    def schedule_has(self, trait: str) -> Array:
        """Rows whose schedule has a property of `ScheduleSpec` that is true or false."""
        return np.asarray([getattr(REGISTRY[name], trait) for name in CHOICES["schedule"]])[self.schedule]

    @property
    def split_backward(self) -> Array:
        """Rows whose schedule computes weight gradients separately from input gradients."""
        return self.schedule_has("split_backward")

    def distinct(self, names: Sequence[str]) -> tuple[LayoutColumns, Array]:
        """The distinct combinations of some fields or properties (as whole rows) and, per row, which of them it is.

        A search has 10⁶ rows but some hundred combinations of tp, cp, mbs and ep: a layer's time is computed for those only.
        """
        key, most = np.zeros(len(self), dtype=np.int64), 1
        for name in names:
            code = getattr(self, name)
            size = int(code.max(initial=0)) + 1
            if most * size > np.iinfo(np.int64).max:
                _, key = np.unique(key, return_inverse=True)
                most = len(self)
            key, most = key * size + code, most * size
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        return self.take(first), inverse

    @property
    def offloads_states(self) -> Array:
        """Rows whose optimizer steps on the host."""
        return self.is_("offload", "optimizer") | self.is_("offload", "parameters")

    @property
    def has_pipeline(self) -> Array:
        return np.asarray(self.pp > 1)

    @property
    def data_ranks(self) -> Array:
        return np.asarray(self.dp * self.cp)

    @property
    def shards(self) -> Array:
        return np.where(self.zero_shards > 0, np.minimum(self.zero_shards, self.data_ranks), self.data_ranks)

    @property
    def sequence_cut(self) -> Array:
        """By what norms and residuals are cut: tp with sequence parallelism, else nothing."""
        return np.where(self.sequence_parallel == 1, self.tp, 1)

    @property
    def expert_cut(self) -> Array:
        """By what tp cuts one expert: etp, else tp, or not at all when ep is spread over the tp ranks too."""
        return np.where(self.etp > 0, self.etp, np.where(self.data_ranks % self.ep == 0, self.tp, 1))

    @property
    def expert_ranks(self) -> Array:
        """Ranks that hold copies or other parts of the same layer's experts, tensor parallelism's cuts left aside."""
        return np.asarray(self.data_ranks * self.tp // self.expert_cut)

    def routed_cut(self, sliced: Array | bool) -> Array:
        """By what the tokens that a rank routes are cut: over tp ranks that hold whole experts; where experts are cut instead,
        along the sequence in an engine that routes slices (`sliced`), else not at all: each tp rank sends them all.
        """
        return np.where(self.expert_cut == self.tp, np.where(sliced, self.sequence_cut, 1), self.tp)

    def key_copies(self, kv_heads: int) -> Array:
        """Ulysses: ranks of cp that share a kv head, each of which needs its copy."""
        return np.asarray(np.maximum(1, self.cp // np.maximum(1, kv_heads // self.tp)))

    def busiest(self, imbalance: float) -> Array:
        """Tokens of the busiest expert rank over the mean; a rank that has all experts has the mean."""
        return np.where(self.ep > 1, imbalance, 1.0)

    def tokens(self, seq: int) -> Array:
        """Tokens of one micro-batch on one rank (the playbook's mbs × mseqlen)."""
        return np.asarray(self.mbs * seq / self.cp)


NAMES: tuple[str, ...] = tuple(field.name for field in fields(LayoutColumns))


def encode(name: str, value: Any) -> int:
    if name in CHOICES:
        return CHOICES[name].index(value)
    return int(value or 0)


def decode(name: str, value: int) -> Any:
    if name in CHOICES:
        return CHOICES[name][value]
    if name in ("keep_gathered", "sequence_parallel"):
        return bool(value)
    return (value or None) if name in ("etp", "zero_shards", "recompute_layers") else value


@dataclass(frozen=True)
class RankShare:
    """What one pipeline rank, or a chunk, holds, per row."""

    rank: Array
    counts: Array
    """layers of each kind: rows × kinds"""
    embedding: Array
    head: Array
    kept: Array
    """of these layers, those that recompute nothing though others do"""
    begin: Array
    """where layers of several kinds alternate, one from which on they follow each other as here; -1: here are several chunks"""
    kinds: tuple[LayerKind, ...]

    @classmethod
    def of_numbers(cls, model: Model, rank: Array, numbers: Array) -> RankShare:
        """From the inverse of `numbers`: rows × numbers."""
        kinds = tuple(model.layer_kinds)
        counts, embedding, head, kept, begin = np.split(numbers, np.cumsum([len(kinds), 1, 1, len(kinds)]), axis=1)
        return cls(rank, counts, embedding[:, 0], head[:, 0], kept, begin[:, 0], kinds)

    @property
    def numbers(self) -> Array:
        return np.column_stack((self.counts, self.embedding, self.head, self.kept, self.begin))

    @classmethod
    def whole(cls, model: Model, rows: int) -> RankShare:
        """A rank that has all of the model, repeated for a table of rows."""
        counts = [*model.layer_kinds.values()]
        return cls.repeated(model, (*counts, 1, 1, *[0] * len(counts), 0), rows)

    @classmethod
    def repeated(cls, model: Model, numbers: Sequence[int], rows: int) -> RankShare:
        """One rank's share for a table of rows."""
        return cls.of_numbers(model, np.zeros(rows, dtype=np.int64), np.tile(np.asarray(numbers), (rows, 1)))

    def each(self) -> Iterator[tuple[LayerKind, Array, Array]]:
        """Of each kind the number of layers, and of those that are kept."""
        return zip(self.kinds, self.counts.T, self.kept.T, strict=True)

    @cached_property
    def layers(self) -> Array:
        return np.asarray(sum(self.counts.T))

    @cached_property
    def kept_layers(self) -> Array:
        return np.asarray(sum(self.kept.T))

    @cached_property
    def moe_layers(self) -> Array:
        return np.asarray(sum((count for kind, count, _ in self.each() if kind.has_experts), 0 * self.embedding))

    @cached_property
    def recomputed_fraction(self) -> Array:
        return np.asarray(1 - self.kept_layers / np.maximum(1, self.layers))


def kinds_alternate(model: Model) -> bool:
    """Whether layers without experts, or with them, are of several kinds; else all with them follow all without."""
    has_experts = [kind.has_experts for kind in model.layer_kinds]
    return len(set(has_experts)) < len(has_experts)


def kinds_before(model: Model) -> Array:
    """How many of the model's first 0, 1, … layers are of each kind: rows × kinds."""
    return _kinds_before(model.each_kind)


@lru_cache(maxsize=256)
def _kinds_before(each_kind: tuple[LayerKind, ...]) -> Array:
    kinds = tuple(dict.fromkeys(each_kind))
    found = np.zeros((len(each_kind) + 1, len(kinds)), dtype=np.int64)
    found[np.arange(len(each_kind)) + 1, [kinds.index(kind) for kind in each_kind]] = 1
    return found.cumsum(axis=0)


def rows_of(table: AnyTable, rows: Array | slice) -> AnyTable:
    """Some rows of a dataclass of arrays, or of such dataclasses; what is the same for all rows stays."""

    def picked(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value[rows]
        if is_dataclass(value) and not isinstance(value, type):
            return type(value)(*(picked(getattr(value, name)) for name in value.__dataclass_fields__))
        if isinstance(value, tuple) and all(map(is_dataclass, value)):
            return tuple(map(picked, value))
        return value

    result: AnyTable = picked(table)
    return result


def where(there: Array, one: AnyTable, other: AnyTable) -> AnyTable:
    """Rows of one dataclass of arrays where they are `there`, of the other in the rest."""
    names = one.__dataclass_fields__  # type: ignore[attr-defined]
    return type(one)(*(np.where(there, getattr(one, name), getattr(other, name)) for name in names))


@dataclass(frozen=True)
class Passes:
    """Seconds of one operator group per micro-batch: forward, gradient of the input, gradient of the weights."""

    forward: Array = NOTHING
    input_grad: Array = NOTHING
    weight_grad: Array = NOTHING

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.input_grad + other.input_grad, self.weight_grad + other.weight_grad)

    def __sub__(self, other: Passes) -> Passes:
        return self + other.scaled(-1.0)

    def scaled(self, factor: Array | float) -> Passes:
        return Passes(self.forward * factor, self.input_grad * factor, self.weight_grad * factor)

    def delayed(self, seconds: float) -> Passes:
        """Forward and backward each start that much later: what the host needs for one action."""
        return Passes(self.forward + seconds, self.input_grad + seconds, self.weight_grad)

    @property
    def parts(self) -> tuple[Array, Array, Array]:
        return self.forward, self.input_grad, self.weight_grad

    @property
    def total(self) -> Array:
        return np.asarray(self.forward + self.input_grad + self.weight_grad)
