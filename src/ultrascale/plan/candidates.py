"""Every layout worth asking about, and their ranking: all legal combinations, less those that another beats by construction.

Left out unless the user fixes them: no sequence parallelism (same bytes, more memory; its all-reduce is faster only where tp
leaves the fast domain, which loses anyway), the contiguous ring (zig-zag has the same bytes and no imbalance), data parallelism
other than bucketed (same bytes, less hidden), slices of the context below 128 tokens, offload (only slower; tried when nothing
fits without). Tests hold the claims about bytes, memory and time to the cost model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal, get_args

import numpy as np

from ultrascale.cost import engines
from ultrascale.cost.columns import CHOICES, NAMES, Array, LayoutColumns, encode
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.legality import RULES, Rule, legal_rows
from ultrascale.cost.recompute import AUTO
from ultrascale.cost.table import ScheduleVariant, SearchTable, compute_lower_bounds, evaluate
from ultrascale.plan.alternatives import LEAST_MEMORY_MAX_SLOWDOWN, AlternativeLayouts
from ultrascale.schedules import DEFAULT_SCHEDULE, REGISTRY
from ultrascale.specs.engine import EngineLimits
from ultrascale.specs.errors import SpecError, divisors, near
from ultrascale.specs.job import Job
from ultrascale.specs.layout import DEGREES, Layout, field_value
from ultrascale.specs.units import GIB

Objective = Literal["throughput", "cost", "memory"]  # the fastest step, the least GPU time per token, the least memory
OBJECTIVES: tuple[str, ...] = get_args(Objective)
# What `--forbid cp` leaves: the value at which the technique is off.
DISABLED_VALUES: dict[str, Any] = {
    **dict.fromkeys((*DEGREES, "virtual_stages", "mbs", "gas"), 1),
    "zero": 0,
    "zero_shards": None,
    "keep_gathered": False,
    "sequence_parallel": False,
    "recompute": "none",
    "recompute_layers": None,
    "etp": None,
    "offload": "none",
    "schedule": DEFAULT_SCHEDULE,
}
# Fields that name how a degree of parallelism communicates: they say nothing where it is 1.
METHOD_DEGREES = {"dispatcher": "ep", "context_parallel": "cp"}
# An eighth of the layouts of a large cluster, with the best in most cases: what a figure of many searches tries.
USUAL_VALUES: dict[str, tuple[Any, ...]] = {
    "mbs": (1, 2, 4),
    "tp": (1, 2, 4, 8, 16),
    "cp": (1, 2, 4, 8, 16),
    "context_parallel": ("zigzag", "ring", "allgather"),
    "keep_gathered": (False,),
}
SHORTEST_SLICE = 128  # tokens: below one tile of an attention kernel a rank computes padding
FIRST_BLOCK = 4096  # cores that are evaluated before the first bound is known
MAX_LOOPS = 8  # virtual stages tried beyond those that divide the layers evenly


@dataclass(frozen=True)
class LayoutConstraints:
    """What the user pinned, what was ruled out, what the engine runs, and what alone is tried, by field of the layout."""

    fixed: dict[str, Any] = field(default_factory=dict)
    forbidden: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    runs: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    tried: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    @classmethod
    def parse(cls, fix: Sequence[str] = (), forbid: Sequence[str] = ()) -> LayoutConstraints:
        """`tp=8` (several separated by commas) and `cp`, `zero=3`, `recompute=full`."""
        fixed: dict[str, Any] = {}
        for text in _words(fix, "--fix"):
            name, text = _pair(text, "--fix")
            if (name, text.strip()) == ("recompute", AUTO):
                continue  # what the search does
            value = field_value(name, text)
            if fixed.setdefault(name, value) != value:
                raise SpecError(
                    f"--fix {name}={_shown(fixed[name])} and --fix {name}={_shown(value)} contradict each other: drop one"
                )
        forbidden: dict[str, tuple[Any, ...]] = {}
        for text in _words(forbid, "--forbid"):
            if "=" in text:
                name, value = _pair(text, "--forbid")
                forbidden[name] = (*forbidden.get(name, ()), field_value(name, value))
                continue
            if text not in DISABLED_VALUES and text in CHOICES:
                raise SpecError(f"--forbid {text} needs a value to rule out, such as --forbid {text}={CHOICES[text][0]}")
            if text not in DISABLED_VALUES:
                field_value(text, "")  # an unknown name has its own sentence
            if text in fixed and fixed[text] != DISABLED_VALUES[text]:
                raise SpecError(f"--fix {text}={_shown(fixed[text])} and --forbid {text} contradict each other: drop one")
            fixed[text] = DISABLED_VALUES[text]
        for name, values in forbidden.items():
            if fixed.get(name) in values and name in fixed:
                value = _shown(fixed[name])
                raise SpecError(f"--fix {name}={value} and --forbid {name}={value} contradict each other: drop one")
        return cls(fixed, forbidden)

    def for_engine(self, name: str) -> LayoutConstraints:
        """These, and what the engine of that name runs."""
        return replace(self, runs=EngineLimits.load(name).layout) if name else self

    def allows(self, name: str, value: Any) -> bool:
        return (name not in self.fixed or self.fixed[name] == value) and value not in self.forbidden.get(name, ())

    def among(self, name: str, values: Sequence[Any]) -> list[Any]:
        """The values of a field to try: the fixed one, though the search alone would not have tried it, or the allowed.

        An engine that runs none of them tries its own.
        """
        if name in self.fixed:
            return [self.fixed[name]]
        runs, tried = self.runs.get(name, values), self.tried.get(name, values)
        values = [one for one in values if one in runs] or runs
        return [value for value in ([one for one in values if one in tried] or values) if self.allows(name, value)]


def _words(texts: Sequence[str], flag: str) -> list[str]:
    if not all(text.strip(" ,") for text in texts):
        raise SpecError(f"{flag} is empty: name a field and a value, such as {flag} tp=8")
    return [word.strip() for text in texts for word in text.split(",") if word.strip()]


def _shown(value: Any) -> str:
    """A value as it is written on the command line."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _pair(text: str, flag: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not value.strip():
        raise SpecError(f"{flag} '{text:.60}' must be a field and a value, such as {flag} tp=8")
    return name.strip(), value


@dataclass(frozen=True)
class LayoutCores:
    """Every legal layout of one pipeline degree but for its schedule, and the schedules to try with each."""

    columns: LayoutColumns
    variants: tuple[ScheduleVariant, ...]


@lru_cache
def _core_rules(engine: str) -> tuple[Rule, ...]:
    """What a layout must keep in that engine, whatever its schedule."""
    rules = (*RULES, *engines.rules(engine))
    return tuple(rule for rule in rules if not {"schedule", "virtual_stages"} & set(rule.fields))


def cores(job: Job, constraints: LayoutConstraints) -> Iterator[LayoutCores]:
    """All cores, grouped by pp; nothing when nothing is legal."""
    constraints = constraints.for_engine(job.framework.engine)
    rules = _core_rules(job.framework.engine)
    of_degrees = tuple(rule for rule in rules if set(rule.fields) <= set(DEGREES))
    others = tuple(rule for rule in rules if rule not in of_degrees)
    by_pp: dict[int, list[tuple[dict[str, int], dict[str, Array]]]] = {}
    for _, of_dp in groupby(_legal_degrees(job, constraints, of_degrees), itemgetter("tp", "cp", "pp", "dp")):
        bases = list(of_dp)  # which differ in ep
        axes = _axes(job, constraints, bases[0])
        for base in bases:
            dispatchers = tuple((word,) for word in constraints.among("dispatcher", _dispatchers(job, base["ep"])))
            cuts = tuple((cut,) for cut in constraints.among("etp", [_expert_cut(job, base)]))
            if dispatchers and cuts and all(axes):
                by_pp.setdefault(base["pp"], []).append((base, _combinations((*axes, dispatchers, cuts))))
    for pp in sorted(by_pp):
        variants, count = _schedules(job, constraints, pp), [len(part["mbs"]) for _, part in by_pp[pp]]
        degrees = {name: np.repeat([base[name] for base, _ in by_pp[pp]], count) for name in DEGREES}
        names = [name for name in NAMES if name not in DEGREES]
        columns = {name: np.concatenate([part[name] for _, part in by_pp[pp]]) for name in names}
        rows = LayoutColumns.from_mapping(columns | degrees)
        rows = rows.take(np.flatnonzero(legal_rows(job, rows, others) & _uses_fixed_methods(rows, constraints)))
        if variants and len(rows):
            yield LayoutCores(rows, tuple(variants))


def _uses_fixed_methods(rows: LayoutColumns, constraints: LayoutConstraints) -> Array:
    """Rows that use the methods that the user fixed."""
    used = [getattr(rows, METHOD_DEGREES[name]) > 1 for name in _fixed_methods(constraints)]
    return np.asarray(np.logical_and.reduce([np.ones(len(rows), dtype=bool), *used]))


def _fixed_methods(constraints: LayoutConstraints) -> list[str]:
    """Fixed to another than the usual one."""
    usual = Layout()
    return [name for name in METHOD_DEGREES if constraints.fixed.get(name, getattr(usual, name)) != getattr(usual, name)]


def _legal_degrees(job: Job, constraints: LayoutConstraints, rules: tuple[Rule, ...]) -> list[dict[str, int]]:
    """Those that no rule of degrees alone excludes, before they are combined with everything else."""
    found = list(_degrees(job, constraints))
    columns = LayoutColumns.of([Layout()]).take(np.zeros(len(found), dtype=np.int64))
    columns = columns.changed(**{name: np.asarray([base[name] for base in found], dtype=np.int64) for name in DEGREES})
    return [base for base, holds in zip(found, legal_rows(job, columns, rules), strict=True) if holds]


def _degrees(job: Job, constraints: LayoutConstraints) -> Iterator[dict[str, int]]:
    """Every dp·tp·pp·cp that fills the cluster, with every ep inside it."""
    model, world = job.model, job.cluster.gpus
    experts = divisors(model.moe.experts) if model.moe is not None else [1]
    for tp in constraints.among("tp", [d for d in divisors(world) if d <= model.heads]):
        for cp in constraints.among("cp", _slices(job, world // tp) if world % tp == 0 else []):
            rest = world // (tp * cp)
            if tp * cp * rest != world:
                continue
            for pp in constraints.among("pp", [d for d in divisors(rest) if d <= model.layers]):
                dp, over = divmod(rest, pp)
                if over or not constraints.allows("dp", dp) or job.sequences % dp:
                    continue
                for ep in constraints.among("ep", [e for e in experts if (dp * cp * tp) % e == 0]):
                    yield {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep}


def _slices(job: Job, ranks: int) -> list[int]:
    """Context-parallel degrees whose slices are no shorter than a tile of attention; without cutting is always one."""
    return [d for d in divisors(ranks) if d == 1 or job.seq // d >= SHORTEST_SLICE]


def _axes(job: Job, constraints: LayoutConstraints, base: dict[str, int]) -> tuple[tuple[tuple[Any, ...], ...], ...]:
    """Every micro-batch, sharding, policy and kind of context parallelism to try with some degrees, whatever ep is."""
    passes = job.sequences // base["dp"]
    batches = [(mbs, passes // mbs) for mbs in constraints.among("mbs", divisors(passes)) if passes % mbs == 0]
    batches = [pair for pair in batches if constraints.allows("gas", pair[1])]
    return (
        tuple(batches),
        tuple(_shardings(job, constraints, base)),
        tuple(_recomputations(constraints)),
        *(
            tuple((word,) for word in words)
            for words in (
                _context_methods(job, constraints, base),
                constraints.among("sequence_parallel", _sequence(job, base)),
                constraints.among("data_parallel", ["bucketed"]),
                constraints.among("offload", ["none"]),
            )
        ),
    )


_AXES = (
    ("mbs", "gas"),
    ("zero", "zero_shards", "keep_gathered"),
    ("recompute", "recompute_layers"),
    ("context_parallel",),
    ("sequence_parallel",),
    ("data_parallel",),
    ("offload",),
    ("dispatcher",),
    ("etp",),
)


@lru_cache(maxsize=256)
def _combinations(axes: tuple[tuple[tuple[Any, ...], ...], ...]) -> dict[str, Array]:
    """Every combination of the axes' values, which many degrees have in common; the schedule is filled in by its variants."""
    index = np.indices([len(values) for values in axes]).reshape(len(axes), -1)
    columns = {
        "schedule": np.full(index.shape[1], encode("schedule", DEFAULT_SCHEDULE)),
        "virtual_stages": np.ones_like(index[0]),
    }
    for names, values, position in zip(_AXES, axes, index, strict=True):
        for name, of_name in zip(names, zip(*values, strict=True), strict=True):
            columns[name] = np.asarray([encode(name, value) for value in of_name])[position]
    return columns


def _shardings(job: Job, constraints: LayoutConstraints, base: dict[str, int]) -> list[tuple[Any, ...]]:
    """ZeRO stages; ZeRO-3 also keeping its layers gathered, and over one fast domain only (HSDP)."""
    data_ranks = base["dp"] * base["cp"]
    levels = constraints.among("zero", range(4) if data_ranks > 1 else (0,))
    local = max(1, job.cluster.fast_domain // base["tp"])
    found = []
    for level in levels:
        hsdp = [local] if level == 3 and 1 < local < data_ranks and data_ranks % local == 0 else []
        for shards in constraints.among("zero_shards", [None, *hsdp]):
            keeps = constraints.among("keep_gathered", [False, True] if level == 3 else [False])
            found += [(level, shards, keep) for keep in keeps]
    return found


def _recomputations(constraints: LayoutConstraints) -> list[tuple[Any, ...]]:
    """Policies, in all layers unless the user fixed how many: `search` takes those back that need not recompute."""
    layers = constraints.among("recompute_layers", [None])
    policies = constraints.among("recompute", CHOICES["recompute"])
    return [(policy, each) for policy in policies for each in layers if policy != "none" or each is None]


def _context_methods(job: Job, constraints: LayoutConstraints, base: dict[str, int]) -> list[str]:
    if base["cp"] == 1:
        return constraints.among("context_parallel", ["zigzag"])[:1]
    balanced = job.seq % (2 * base["cp"]) == 0 and "zigzag" in constraints.runs.get("context_parallel", ("zigzag",))
    return constraints.among("context_parallel", ["zigzag" if balanced else "ring", "allgather", "ulysses"])


def _sequence(job: Job, base: dict[str, int]) -> list[bool]:
    return [job.seq // base["cp"] % base["tp"] == 0]


def _dispatchers(job: Job, ep: int) -> list[str]:
    """NCCL's, and the kernels made for the cluster's links: DeepEP knows nodes of 8 GPUs, HybridEP larger NVLink domains."""
    return ["alltoall"] if ep == 1 else ["alltoall", "deepep" if job.cluster.fast_domain <= 8 else "hybridep"]


def _expert_cut(job: Job, base: dict[str, int]) -> int | None:
    """The usual one, or that of an engine which does not cut experts with ep."""
    cuts = base["ep"] > 1 and base["tp"] > 1 and base["dp"] * base["cp"] % base["ep"] == 0
    return 1 if cuts and job.framework.sliced_routing == "with-ep" else None


_PIPELINE = {"schedule", "virtual_stages", "pp"}


def _schedules(job: Job, constraints: LayoutConstraints, pp: int) -> list[ScheduleVariant]:
    if pp == 1:
        pairs = [(DEFAULT_SCHEDULE, 1)]
    else:
        deepest = job.model.layers // pp
        even = [v for v in divisors(job.model.layers) if job.model.layers % (pp * v) == 0]
        loops = sorted({*range(2, min(deepest, MAX_LOOPS) + 1), *(v for v in even if 1 < v <= deepest)})
        if "virtual_stages" in constraints.fixed:
            loops = [v for v in [constraints.fixed["virtual_stages"]] if 1 < v <= deepest]
        pairs = [(spec.name, v) for v in (1, *loops) for spec in REGISTRY.values() if spec.takes(v)]
    pairs = [(name, v) for name, v in pairs if constraints.allows("schedule", name) and constraints.allows("virtual_stages", v)]
    rows = LayoutColumns.of([Layout(pp=pp, schedule=name, virtual_stages=stages) for name, stages in pairs])
    rules = tuple(rule for rule in engines.rules(job.framework.engine) if set(rule.fields) <= _PIPELINE)
    return [pair for pair, runs in zip(pairs, legal_rows(job, rows, rules), strict=True) if runs]


def why_empty(job: Job, constraints: LayoutConstraints) -> str:
    """Why no layout is legal: the first rule that the pinned fields alone already break, or the batch."""
    pinned = dict(constraints.fixed)
    if pinned:
        layout = Layout.model_construct(**{**Layout().model_dump(), **pinned})
        row = LayoutColumns.of([layout])
        for name, value in pinned.items():
            sentence = engines.value_problem(job.framework.engine, name, value)
            if sentence is not None and value != DISABLED_VALUES.get(name):
                return f"{sentence}, or another --framework"
        for rule in (*RULES, *engines.rules(job.framework.engine)):
            if set(rule.fields) <= set(pinned) and not rule.holds(job, row)[0]:
                return rule.sentence(job, layout)
    world = job.cluster.gpus
    for name in ("dp", "tp", "pp", "cp"):
        if world % pinned.get(name, 1):
            return f"layout.{name} is {pinned[name]} but must divide {world} GPUs: try {near(pinned[name], divisors(world))}"
    if pinned.get("ep", 1) > 1 and job.model.moe is None:
        return f"layout.ep is {pinned['ep']} but {job.model.name} has no experts: try 1"
    for name in _fixed_methods(constraints):
        asked, usual = f"layout.{name} is {pinned[name]}", getattr(Layout(), name)
        if name == "dispatcher" and job.model.moe is None:
            return f"{asked} but {job.model.name} has no experts: try {usual}"
        if pinned.get(METHOD_DEGREES[name]) == 1:
            return f"{asked} but {METHOD_DEGREES[name]} is 1: try {usual}, or {METHOD_DEGREES[name]}=2"
    words = [f"--fix {name}={_shown(value)}" for name, value in pinned.items()]
    words += [f"--forbid {name}={_shown(value)}" for name, values in constraints.forbidden.items() for value in values]
    fixed = f" with {' '.join(words)}" if words else ""
    return (
        f"no legal layout cuts {job.sequences} sequences over {world} GPUs{fixed}: try fewer --fix or --forbid, "
        f"or another batch, such as --batch-tokens {world * job.seq}"
    )


@dataclass(frozen=True)
class RankedLayouts:
    job: Job
    rows: LayoutColumns
    """the best, best first"""
    score: list[float]
    evaluated: int
    """legal layouts, with those that a lower bound excluded"""
    fitting: int
    """of those that were evaluated in full"""
    tables: Sequence[SearchTable]
    """all that were searched, if alternatives were asked for"""
    alternatives: AlternativeLayouts = field(default_factory=AlternativeLayouts)


def rank(
    job: Job,
    constraints: LayoutConstraints,
    objective: Objective,
    keep: int,
    capacity_bytes: float | None = None,
    with_alternatives: bool = False,
    tables: Sequence[SearchTable] | None = None,
) -> RankedLayouts:
    """The best legal layouts that fit (into the GPU, unless a capacity is given), by closed forms.

    `with_alternatives`: also layouts of other kinds. `tables`: of these alone, which an earlier search has made.

    Branch and bound: lower bounds of time and memory are cheap, so cores are evaluated in the order of their bound, until that
    of the next is above the last that is kept.
    """
    machine, by_memory = ClusterRates(job), objective == "memory"
    capacity = job.cluster.gpu.memory_gib * GIB if capacity_bytes is None else capacity_bytes
    if tables is None:
        tables = [SearchTable(job, one.columns, one.variants, machine) for one in cores(job, constraints)]
        compute_lower_bounds(tables, of="peak" if by_memory else "step")
    legal = sum(table.legal_cells for table in tables)
    bounds = [table.peak_lower_bound_bytes() if by_memory else table.step_lower_bound_s() for table in tables]
    bound = np.concatenate([np.zeros(0), *bounds])
    order = np.argsort(bound, kind="stable")
    ends = np.cumsum([len(one.cores) for one in tables])
    scores, rows = np.zeros(0), [LayoutColumns.of([])]
    alternatives, fitting, start, size = AlternativeLayouts(), 0, 0, FIRST_BLOCK

    def slowest_kept(*some: Array) -> float:
        times = np.concatenate(some)
        worst = float(np.partition(times, keep - 1)[keep - 1]) if len(times) >= keep else np.inf
        return max(worst, LEAST_MEMORY_MAX_SLOWDOWN * times.min(initial=np.inf)) if with_alternatives else worst

    while start < len(order):
        worst = slowest_kept(scores)
        block = order[start : start + size]
        block = np.sort(block[bound[block] <= worst])
        if not len(block):
            break
        start, size = start + size, 4 * size
        mine = [
            some - end + len(one.cores)
            for one, end, some in zip(tables, ends, np.split(block, np.searchsorted(block, ends[:-1])), strict=True)
        ]
        if by_memory:
            evaluated = evaluate(tables, mine, min(capacity, worst), None)
        else:
            evaluated = evaluate(tables, mine, capacity, worst, partial(slowest_kept, scores))
        for cells in evaluated:
            fitting += int(cells.fits.sum())
            if with_alternatives:
                alternatives.add(cells)
            score = np.where(cells.fits, cells.peak_bytes, np.inf) if by_memory else cells.step_s
            core, variant = _least(score, keep)
            rows.append(cells.layouts(core, variant))
            scores = np.concatenate([scores, score[core, variant]])
    best = np.argsort(scores, kind="stable")[:keep]
    found = LayoutColumns.joined(rows).take(best)
    weight = job.cluster.gpus if objective == "cost" else 1.0
    scored, kept = (weight * scores[best]).tolist(), tables if with_alternatives else ()
    return RankedLayouts(job, found, scored, legal, fitting, kept, alternatives)


def _least(score: Array, most: int) -> tuple[Array, Array]:
    """Cores and variants with the least finite scores, in the order of the table; more than `most` where the last are equal."""
    variant, core = np.nonzero(np.isfinite(score.T))
    found = score[core, variant]
    if len(found) > most:
        among = found <= np.partition(found, most - 1)[most - 1]
        core, variant = core[among], variant[among]
    order = np.lexsort((variant, core))
    return core[order], variant[order]
