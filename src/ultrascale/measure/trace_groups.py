"""The process group of a collective in a rank's trace: by Kineto's metadata, by our engine's layout, or as the only group."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

from ultrascale.measure.trace_rank import RankTrace
from ultrascale.measure.trace_steps import CommInterval

_AXES = {"tensor": ("tp",), "context": ("cp",), "pipeline": ("pp",), "zero": ("dp", "cp"), "data": ("dp", "cp")}
"""axes on which our engine's ranks of one group differ; bookkeeping is of all ranks"""
_UNNAMED = ("", "undefined", "default_pg")
"""descriptions that torch gives groups without one"""


class TracedGroup(NamedTuple):
    """A process group, or the two ends of messages in one direction. Equal on all of its ranks."""

    name: str
    ranks: tuple[int, ...]
    """empty: unknown, then its ranks are those whose traces have this group"""
    size: int


class CommLabel(NamedTuple):
    """Groups of one axis, as a reader knows them: `tensor`, `mesh_tp`, 8 ranks."""

    technique: str
    description: str
    size: int


class ProcessGroups:
    """Finds the group of each collective of one trace."""

    def __init__(self, trace: RankTrace) -> None:
        self._rank, self._on_gpu = trace.rank, trace.on_gpu
        ours = trace.ours or {}
        self._place, self._layout = _integers(ours.get("place")), ours.get("layout")
        self._configured = _configured(trace)

    def group(self, one: CommInterval) -> TracedGroup | None:
        """None where the trace does not tell which ranks take part."""
        if "Process Group Name" in one.facts:
            return self._named(one)
        if self._place and isinstance(self._layout, dict) and not self._on_gpu:
            return self._own(one, self._layout)
        several = {ranks for _, ranks in self._configured.values() if len(ranks) > 1}
        if len(several) != 1 or one.kind == "send_recv":
            return None  # gloo, and kernels of CUDA graphs, do not say which group they belong to
        (ranks,) = several
        return TracedGroup("the only group", ranks, len(ranks))

    def label(self, one: CommInterval) -> CommLabel:
        group, name = self.group(one), str(one.facts.get("Process Group Name", ""))
        description = str(one.facts.get("Process Group Description", "")) or self._configured.get(name, ("", ()))[0]
        return CommLabel(
            one.technique,
            "" if description in _UNNAMED else description[:60],
            self._size(one) if group is None or one.kind == "send_recv" else group.size,
        )

    def stage(self, transfers: Iterable[CommInterval]) -> int | None:
        """The rank's pipeline stage: by our engine's metadata, or its place in the largest group that sends messages."""
        if self._place:
            return self._place["pp"]
        names = {str(one.facts.get("Process Group Name", "")) for one in transfers if one.technique == "pipeline"}
        ranks = max((self._configured.get(name, ("", ()))[1] for name in names), key=len, default=())
        return ranks.index(self._rank) if self._rank in ranks else None

    def _named(self, one: CommInterval) -> TracedGroup | None:
        name, facts = str(one.facts["Process Group Name"]), one.facts
        ranks = self._configured.get(name, ("", ()))[1] or _listed_ranks(str(facts.get("Process Group Ranks", "")))
        size = self._size(one) or len(ranks)
        if one.kind != "send_recv":
            return TracedGroup(name, ranks, size)
        sends = "send" in str(facts.get("Collective name", "")).lower()
        source, target = (self._rank, facts.get("Dst Rank")) if sends else (facts.get("Src Rank"), self._rank)
        if isinstance(source, int) and isinstance(target, int) and source != target:
            return TracedGroup(f"{name} from {source} to {target}", (source, target), 2)
        return TracedGroup(name, ranks, size) if size == 2 else None  # several messages in one kernel, to ranks unknown

    def _own(self, one: CommInterval, layout: dict[str, Any]) -> TracedGroup | None:
        """Of our engine on a CPU: ranks whose place differs only on the technique's axes."""
        axes = tuple(self._place) if one.technique == "bookkeeping" else _AXES.get(one.technique, ())
        if not axes or (one.technique == "zero" and layout.get("zero_shards") not in (None, layout.get("dp"))):
            return None
        fixed = " ".join(f"{axis}{value}" for axis, value in self._place.items() if axis not in axes)
        name = f"{one.technique} of {fixed or 'all ranks'}"
        if one.kind != "send_recv":
            return TracedGroup(name, (), self._size(one))
        if layout.get("pp") != 2:
            return None  # gloo does not name the other end
        stage = self._place["pp"] if "send" in str(one.facts.get("Collective name")) else 1 - self._place["pp"]
        return TracedGroup(f"{name} from stage {stage}", (), 2)

    def _size(self, one: CommInterval) -> int:
        """Number of ranks; 0: unknown."""
        size = one.facts.get("Group size")
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
        if not isinstance(self._layout, dict):
            return 0
        axes = tuple(self._place) if one.technique == "bookkeeping" else _AXES.get(one.technique, ())
        degrees = [self._layout.get(axis, 1) for axis in axes]
        return prod(degrees) if axes and all(isinstance(degree, int) for degree in degrees) else 0


def _integers(place: object) -> dict[str, int]:
    """A rank's place on the axes, where it is one."""
    known = isinstance(place, dict) and all(isinstance(place.get(axis), int) for axis in ("pp", "dp", "cp", "tp"))
    return {axis: place[axis] for axis in ("pp", "dp", "cp", "tp")} if known and isinstance(place, dict) else {}


def _configured(trace: RankTrace) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Description and ranks of the process groups that the trace lists."""
    distributed = trace.facts.get("distributedInfo")
    listed = distributed.get("pg_config") if isinstance(distributed, dict) else None
    found = {}
    for one in listed if isinstance(listed, list) else ():
        if isinstance(one, dict):
            ranks = one.get("ranks")
            plain = tuple(ranks) if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks) else ()
            found[str(one.get("pg_name"))] = (str(one.get("pg_desc", "")), plain)
    return found


def _listed_ranks(text: str) -> tuple[int, ...]:
    """Of `[0, 8]`; Kineto cuts long lists off with dots, and these say nothing."""
    return tuple(int(word) for word in re.findall(r"\d{1,9}", text)) if "..." not in text and len(text) < 10_000 else ()
