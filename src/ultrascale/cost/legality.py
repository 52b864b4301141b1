"""Which layouts a job can take. Every rule is one predicate over columns and one sentence for the person who broke it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ultrascale.cost.columns import CHOICES, Array, LayoutColumns
from ultrascale.schedules import DEFAULT_SCHEDULE, legal, legal_mask
from ultrascale.specs.errors import SpecError, divisors, near
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model


@dataclass(frozen=True)
class Rule:
    fields: tuple[str, ...]
    """what the rule looks at; the enumeration applies it as soon as those are set"""
    holds: Callable[[Job, LayoutColumns], Array]
    sentence: Callable[[Job, Layout], str]


def _gpus(job: Job, layout: Layout) -> str:
    world, rest = job.cluster.gpus, layout.tp * layout.pp * layout.cp
    sizes = near(rest, divisors(world)).split(" or ")
    both = " or ".join(f"tp·pp·cp={size} with dp={world // int(size)}" for size in sizes)
    hint = f"dp={world // rest}" if world % rest == 0 else both
    return (
        f"layout.dp·tp·pp·cp is {layout.dp}·{layout.tp}·{layout.pp}·{layout.cp} = {layout.gpus} "
        f"but the cluster has {world} GPUs: try {hint}"
    )


def _tp_cuts_heads(job: Job, c: LayoutColumns) -> Array:
    model = job.model
    kv = (model.kv_heads % c.tp == 0) | (c.tp % model.kv_heads == 0)
    recurrent = 0 if (groups := recurrent_groups(model)) is None else groups[1] % c.tp
    return np.asarray((model.heads % c.tp == 0) & kv & (recurrent == 0))


def recurrent_groups(model: Model) -> tuple[str, int] | None:
    """The field of the groups of heads that linear attention or Mamba-2 is cut by, and their number."""
    if model.mamba is not None:
        return "mamba.groups", model.mamba.groups
    return None if model.linear_attention is None else ("linear_attention.key_heads", model.linear_attention.key_heads)


def _tp_sentence(job: Job, layout: Layout) -> str:
    model = job.model
    allowed = [d for d in divisors(model.heads) if model.kv_heads % d == 0 or d % model.kv_heads == 0]
    if (groups := recurrent_groups(model)) is not None and groups[1] % layout.tp:
        field, count = groups
        hint = near(layout.tp, [d for d in allowed if count % d == 0])
        return f"layout.tp is {layout.tp} but must divide {field} = {count}: try {hint}"
    return (
        f"layout.tp is {layout.tp} but must divide heads = {model.heads}, and divide or be a multiple of "
        f"kv_heads = {model.kv_heads}: try {near(layout.tp, allowed)}"
    )


def _widths(job: Job) -> dict[str, int]:
    model = job.model
    widths = {"ffn": model.ffn} if model.dense_layers else {}
    if model.moe is not None:
        widths["moe.expert_ffn"] = model.moe.expert_ffn
        if model.moe.shared_experts:
            widths["moe.shared_expert_ffn"] = model.moe.shared_expert_ffn
    return widths


def _mlp_sentence(job: Job, layout: Layout) -> str:
    name, width = next((n, w) for n, w in _widths(job).items() if w % layout.tp)
    return f"layout.tp is {layout.tp} but must divide {name} = {width}: try {near(layout.tp, divisors(width))}"


def _cp_cuts_sequence(job: Job, c: LayoutColumns) -> Array:
    slices = np.where(c.is_("context_parallel", "zigzag") & (c.cp > 1), 2 * c.cp, c.cp)
    return np.asarray(job.seq % slices == 0)


def _cp_sentence(job: Job, layout: Layout) -> str:
    twice = layout.context_parallel == "zigzag"
    allowed = [d for d in divisors(job.seq) if not twice or job.seq % (2 * d) == 0]
    parts = "2·cp slices (zigzag)" if twice else "cp slices"
    return f"layout.cp is {layout.cp} but seq = {job.seq} must split into {parts}: try {near(layout.cp, allowed)}"


def _ulysses_has_heads(job: Job, c: LayoutColumns) -> Array:
    heads = job.model.heads // np.minimum(c.tp, job.model.heads)
    kv = np.maximum(1, job.model.kv_heads // c.tp)
    enough = (heads % c.cp == 0) & ((kv % c.cp == 0) | (c.cp % kv == 0))
    return np.asarray(~c.is_("context_parallel", "ulysses") | (c.cp == 1) | enough)


def _ep_cuts_experts(job: Job, c: LayoutColumns) -> Array:
    experts = job.model.moe.experts if job.model.moe is not None else 1
    return np.asarray((experts % c.ep == 0) & (c.expert_ranks % c.ep == 0))


def _etp_sentence(job: Job, layout: Layout) -> str:
    if job.model.moe is None:
        return f"layout.etp is {layout.etp} but {job.model.name} has no experts: try null"
    return f"layout.etp is {layout.etp} but tp cuts each expert in tp = {layout.tp} parts or not at all: try {layout.tp} or 1"


def _ep_sentence(job: Job, layout: Layout) -> str:
    if job.model.moe is None:
        return f"layout.ep is {layout.ep} but {job.model.name} has no experts: try 1"
    experts = job.model.moe.experts
    ranks = layout.data_ranks * layout.tp // (layout.etp or 1)
    allowed = [d for d in divisors(experts) if ranks % d == 0]
    product = f"dp·cp·tp{'' if layout.etp is None else '/etp'}"
    return (
        f"layout.ep is {layout.ep} but must divide both the {experts} experts and {product} = {ranks}: "
        f"try {near(layout.ep, allowed)}"
    )


def _schedule_legal(job: Job, c: LayoutColumns) -> Array:
    result = np.zeros(len(c), dtype=bool)
    for code in np.unique(c.schedule):
        rows = c.schedule == code
        name = CHOICES["schedule"][code]
        legal_rows = legal_mask(name, c.pp[rows], c.gas[rows], c.virtual_stages[rows])
        result[rows] = np.where(c.pp[rows] == 1, (c.virtual_stages[rows] == 1) & (name == DEFAULT_SCHEDULE), legal_rows)
    return result


def _schedule_sentence(job: Job, layout: Layout) -> str:
    if layout.pp == 1:
        return (
            f"layout.schedule is {layout.schedule} with virtual_stages = {layout.virtual_stages} but pp = 1 has no "
            f"pipeline: try schedule={DEFAULT_SCHEDULE} and virtual_stages=1"
        )
    reason = legal(layout.schedule, layout.pp, layout.gas, layout.virtual_stages) or ""
    return "layout." + reason.replace("microbatches", "gas", 1)


def _batch_sentence(job: Job, layout: Layout) -> str:
    given, wanted = layout.dp * layout.mbs * layout.gas, job.sequences
    per_pass = layout.dp * layout.mbs
    if wanted % per_pass == 0:
        hint = f"gas={wanted // per_pass}"
    elif wanted >= per_pass:
        low = wanted // per_pass * per_pass
        hint = f"batch_tokens={low * job.seq} or {(low + per_pass) * job.seq}"
    else:
        hint = f"batch_tokens={per_pass * job.seq}"
    return (
        f"layout.dp·mbs·gas is {layout.dp}·{layout.mbs}·{layout.gas} = {given} sequences but the batch is {wanted} "
        f"sequences of {job.seq} tokens: try {hint}"
    )


def _recomputes_some_layers(job: Job, c: LayoutColumns) -> Array:
    stages = c.pp * c.virtual_stages
    return np.asarray((c.recompute_layers == 0) | ((c.recompute > 0) & (c.recompute_layers <= -(-job.model.layers // stages))))


def _recompute_layers_sentence(job: Job, layout: Layout) -> str:
    given = f"layout.recompute_layers is {layout.recompute_layers}"
    if layout.recompute == "none":
        return f"{given} but layout.recompute is none: try recompute=full, or recompute_layers=null"
    most = -(-job.model.layers // (layout.pp * layout.virtual_stages))
    return f"{given} but a pipeline stage has {most} layers: try {most} or less, or null for all"


def _pipeline_layers(job: Job) -> int:
    """What stages are cut from: embedding and head too where they count as layers."""
    return job.model.layers + 2 * (job.framework.stage_split == "layers-and-ends")


RULES: tuple[Rule, ...] = (
    Rule(("dp", "tp", "pp", "cp"), lambda job, c: np.asarray(c.dp * c.tp * c.pp * c.cp == job.cluster.gpus), _gpus),
    Rule(("tp",), _tp_cuts_heads, _tp_sentence),
    Rule(("tp",), lambda job, c: np.logical_and.reduce([width % c.tp == 0 for width in _widths(job).values()]), _mlp_sentence),
    Rule(("cp", "context_parallel"), _cp_cuts_sequence, _cp_sentence),
    Rule(
        ("cp", "tp", "context_parallel"),
        _ulysses_has_heads,
        lambda job, x: (
            f"layout.cp is {x.cp} with context_parallel = ulysses but each tp rank has {job.model.heads // x.tp} heads and "
            f"{max(1, job.model.kv_heads // x.tp)} kv heads to spread: try context_parallel=zigzag"
        ),
    ),
    Rule(
        ("tp", "cp", "sequence_parallel"),
        lambda job, c: (c.sequence_parallel == 0) | (c.tp == 1) | ((job.seq // np.maximum(c.cp, 1)) % c.tp == 0),
        lambda job, x: (
            f"layout.sequence_parallel needs seq/cp = {job.seq // x.cp} to split over tp = {x.tp}: "
            f"try sequence_parallel=false or tp={near(x.tp, divisors(max(1, job.seq // x.cp)))}"
        ),
    ),
    Rule(("ep", "dp", "cp", "tp", "etp"), _ep_cuts_experts, _ep_sentence),
    Rule(
        ("pp", "virtual_stages"),
        lambda job, c: np.asarray(c.pp * c.virtual_stages <= _pipeline_layers(job)),
        lambda job, x: (
            f"layout.pp·virtual_stages is {x.pp}·{x.virtual_stages} = {x.pp * x.virtual_stages} but there are only "
            f"{_pipeline_layers(job)} layers: try pp={max(1, _pipeline_layers(job) // x.virtual_stages)}"
        ),
    ),
    Rule(("schedule", "pp", "gas", "virtual_stages"), _schedule_legal, _schedule_sentence),
    Rule(("dp", "mbs", "gas"), lambda job, c: np.asarray(c.dp * c.mbs * c.gas == job.sequences), _batch_sentence),
    Rule(
        ("zero", "zero_shards", "dp", "cp"),
        lambda job, c: np.asarray((c.zero_shards == 0) | ((c.zero > 0) & (c.data_ranks % np.maximum(c.zero_shards, 1) == 0))),
        lambda job, x: (
            f"layout.zero_shards is {x.zero_shards} but needs zero of 1 to 3 and must divide dp·cp = {x.data_ranks}: try "
            + (near(x.zero_shards or 1, divisors(x.data_ranks)) if x.zero else "zero_shards=null or zero=1")
        ),
    ),
    Rule(
        ("zero", "keep_gathered"),
        lambda job, c: np.asarray((c.keep_gathered == 0) | (c.zero == 3)),
        lambda job, x: f"layout.keep_gathered is a choice of ZeRO-3 but zero is {x.zero}: try keep_gathered=false or zero=3",
    ),
    Rule(
        ("zero", "offload"),
        lambda job, c: np.asarray(~c.is_("offload", "parameters") | (c.zero == 3)),
        lambda job, x: f"layout.offload = parameters needs zero = 3 but zero is {x.zero}: try zero=3 or offload=optimizer",
    ),
    Rule(
        ("data_parallel", "zero", "virtual_stages"),
        lambda job, c: np.asarray(~c.is_("data_parallel", "ddp") | ((c.zero == 0) & (c.virtual_stages == 1))),
        lambda job, x: (
            "layout.data_parallel = ddp works with zero = 0 and one stage per rank only "
            f"(zero is {x.zero}, virtual_stages {x.virtual_stages}): try data_parallel=bucketed"
        ),
    ),
    Rule(("recompute", "recompute_layers", "pp", "virtual_stages"), _recomputes_some_layers, _recompute_layers_sentence),
    Rule(
        ("gas",),
        lambda job, c: np.asarray((job.framework.accumulation != "stepped") | (c.gas == 1)),
        lambda job, x: f"layout.gas is {x.gas} but an optimizer in backward steps after one micro-batch: try gas=1",
    ),
    Rule(
        ("etp", "tp"),
        lambda job, c: np.asarray((c.etp == 0) | ((job.model.moe is not None) & ((c.etp == 1) | (c.etp == c.tp)))),
        _etp_sentence,
    ),
)


def legal_rows(job: Job, columns: LayoutColumns, rules: tuple[Rule, ...] = RULES) -> Array:
    """Per row: may the job be cut so?"""
    result = np.ones(len(columns), dtype=bool)
    for rule in rules:
        result &= rule.holds(job, columns)
    return result


def problem(job: Job, layout: Layout) -> str | None:
    """The first broken rule's sentence, or None."""
    row = LayoutColumns.of([layout])
    return next((rule.sentence(job, layout) for rule in RULES if not rule.holds(job, row)[0]), None)


def check(job: Job, layout: Layout) -> None:
    sentence = problem(job, layout)
    if sentence is not None:
        raise SpecError(sentence)
