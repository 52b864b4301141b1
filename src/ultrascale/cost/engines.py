"""Which jobs and layouts an engine runs: specs/presets/engines.yaml as rules, and rules of several fields."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ultrascale.cost import legality
from ultrascale.cost.columns import Array, LayoutColumns, encode
from ultrascale.cost.legality import Rule
from ultrascale.schedules import REGISTRY
from ultrascale.specs.engine import OWN_ENGINE, EngineLimits, model_problem
from ultrascale.specs.errors import divisors, near
from ultrascale.specs.job import OPTIMIZERS, Job
from ultrascale.specs.layout import Layout

TORCHTITAN_END_LAYERS = 2  # layers that torchtitan counts for the embedding and the head when it cuts stages


def job_problem(job: Job, engine: str | None = None) -> str | None:
    """Why the job's engine, or another, cannot run it under any layout, with what to try; None if it can."""
    name = job.framework.engine if engine is None else engine
    if not name:
        return None
    if name == OWN_ENGINE:
        if (sentence := model_problem(job.model)) is not None:
            return sentence
        if OPTIMIZERS[job.optimizer].matrices is not None and job.adapter_rank is not None:
            given = f"job.optimizer is {job.optimizer} but job.adapter_rank is {job.adapter_rank}"
            return f"{given}, and Muon steps whole matrices: try adamw"
    limits = EngineLimits.load(name)
    for field, values in limits.job.items():
        value = getattr(job, field)
        if value not in values:
            return _sentence("job", field, value, limits)
    return None


def problem(job: Job, layout: Layout) -> str | None:
    """Why the layout is not legal, or why the job's engine does not run it; None if it runs."""
    return legality.problem(job, layout) or layout_problem(job, layout)


def layout_problem(job: Job, layout: Layout, engine: str | None = None) -> str | None:
    """The first rule of the job's engine, or of another, that the layout breaks, as a sentence; None if it runs."""
    row, name = LayoutColumns.of([layout]), job.framework.engine if engine is None else engine
    return next((rule.sentence(job, layout) for rule in rules(name) if not rule.holds(job, row)[0]), None)


def value_problem(engine: str, field: str, value: Any) -> str | None:
    """Why the engine does not run this value of a field of the layout; None if it does."""
    limits = EngineLimits.load(engine) if engine else None
    runs = limits is None or value in limits.layout.get(field, (value,))
    return None if runs or limits is None else _sentence("layout", field, value, limits)


@cache
def rules(engine: str) -> tuple[Rule, ...]:
    if not engine:
        return ()
    return (
        *(_allowed_values_rule(EngineLimits.load(engine), field) for field in EngineLimits.load(engine).layout),
        *_COMBINATION_RULES.get(engine, ()),
    )


def _allowed_values_rule(engine: EngineLimits, field: str) -> Rule:
    codes = np.asarray([encode(field, value) for value in engine.layout[field]])
    return Rule(
        (field,),
        lambda job, c: np.any(getattr(c, field)[:, None] == codes, axis=1) | ~has_effect(field, c),
        lambda job, x: _sentence("layout", field, getattr(x, field), engine),
    )


def has_effect(field: str, c: LayoutColumns) -> Array:
    """Rows in which the field changes anything."""
    if field in ("schedule", "virtual_stages"):
        return np.asarray(c.pp > 1)
    if field == "sequence_parallel":
        return np.asarray(c.tp > 1)
    if field == "context_parallel":
        return np.asarray(c.cp > 1)
    if field == "data_parallel":
        return np.asarray(((c.zero == 0) | (c.shards == 1)) & (c.data_ranks > 1))
    if field == "etp":
        return np.asarray(c.tp > 1)
    if field == "dispatcher":
        return np.asarray(c.ep > 1)
    if field == "zero_shards":
        return np.asarray(c.shards < c.data_ranks)
    return np.asarray(c.data_ranks > 1) if field in ("zero", "keep_gathered") else np.ones(len(c), dtype=bool)


def _sentence(what: str, field: str, value: Any, engine: EngineLimits) -> str:
    values = (engine.layout if what == "layout" else engine.job)[field]
    if not values:  # an engine without pipeline parallelism
        return f"{what}.{field} is {_word(value)} but {engine.title} runs no pipeline: try pp=1, and no {field}"
    if values == (None,):
        return f"{what}.{field} is {_word(value)} but {engine.title} has no such setting: try null"
    known = ", ".join(_word(one) for one in values)
    return f"{what}.{field} is {_word(value)} but {engine.title} runs {known}: try {_word(values[0])}"


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _vocabulary_sentence(job: Job, x: Layout) -> str:
    vocab = job.model.vocab
    return f"layout.tp is {x.tp} but must divide vocab = {vocab}: try {near(x.tp, divisors(vocab))}"


def _keeps_sliding_window(job: Job, c: LayoutColumns) -> Array:
    window = job.model.sliding_window
    return np.asarray((c.cp == 1) | c.is_("context_parallel", "ulysses") | (window is None or window >= job.seq))


def _sliding_window_sentence(job: Job, x: Layout) -> str:
    return (
        f"layout.context_parallel is {x.context_parallel} but a window of {job.model.sliding_window} tokens is only kept by "
        "ulysses: try context_parallel=ulysses or cp=1"
    )


def _recurrence_has_heads(job: Job, c: LayoutColumns) -> Array:
    groups = legality.recurrent_groups(job.model)
    return np.asarray((c.cp == 1) | (groups is None or groups[1] % (c.tp * c.cp) == 0))


def _recurrence_sentence(job: Job, x: Layout) -> str:
    field, count = legality.recurrent_groups(job.model) or ("", 1)
    return (
        f"layout.cp·tp is {x.cp}·{x.tp} = {x.cp * x.tp} but must divide {field} = {count}: try "
        f"cp={near(x.cp, divisors(max(1, count // x.tp)))}"
    )


def _experts_sentence(job: Job, x: Layout) -> str:
    experts = job.model.moe.experts if job.model.moe is not None else 1
    allowed = [ep for ep in divisors(x.data_ranks) if experts % ep == 0]
    return (
        f"layout.ep is {x.ep} but the engine spreads experts over data ranks, of which there are dp·cp = {x.data_ranks}: "
        f"try {near(x.ep, allowed)}"
    )


def _ddp_supported(job: Job, c: LayoutColumns) -> Array:
    ddp = c.is_("data_parallel", "ddp") & (c.data_ranks > 1)
    return np.asarray(~ddp | ((job.precision == "fp32") & ~((c.pp > 1) & c.split_backward) & (c.ep == 1)))


def _ddp_sentence(job: Job, x: Layout) -> str:
    if job.precision != "fp32":
        why = f"reduces in {job.precision}, not in fp32"
    elif x.ep > 1:
        why = f"reduces experts (ep = {x.ep}) over all data ranks"
    else:
        why = f"does not see the split backward of {x.schedule}"
    return f"layout.data_parallel = ddp {why}: try data_parallel=bucketed"


def torchtitan_stages(layers: int, per_stage: Any) -> Any:
    """Stages that torchtitan cuts with so many layers in each."""
    return -(-(layers + TORCHTITAN_END_LAYERS) // per_stage)


def torchtitan_default_stages(c: LayoutColumns) -> Array:
    """Stages of a rank where torchtitan is not told how many layers a stage has."""
    looped = np.asarray([spec.most_stages != 1 for spec in REGISTRY.values()])[c.schedule]
    return np.where(looped, 2, 1)


def _torchtitan_splits_layers(job: Job, c: LayoutColumns) -> Array:
    stages = c.pp * c.virtual_stages
    cut = torchtitan_stages(job.model.layers, torchtitan_stages(job.model.layers, stages)) == stages
    usual = torchtitan_default_stages(c)
    return np.asarray((c.pp == 1) | (((c.virtual_stages == usual) | cut) & ((usual == 1) | (c.virtual_stages > 1))))


def _torchtitan_cuts_experts(job: Job, c: LayoutColumns) -> Array:
    """From 0.3 on they are whole with ep, else cut by tp."""
    by_ep = job.model.moe is not None and job.framework.sliced_routing == "with-ep"
    return np.asarray((not by_ep) | (c.expert_cut == np.where(c.ep > 1, 1, c.tp)))


def _torchtitan_experts_sentence(job: Job, x: Layout) -> str:
    given = "null" if x.etp is None else str(x.etp)
    if x.ep > 1:
        return f"layout.etp is {given} but torchtitan does not cut experts by tp = {x.tp} with ep = {x.ep}: try etp=1"
    return f"layout.etp is {given} but torchtitan cuts experts by tp = {x.tp} where ep is 1: try null"


_COMBINATION_RULES: dict[str, tuple[Rule, ...]] = {
    OWN_ENGINE: (
        Rule(("tp",), lambda job, c: np.asarray(job.model.vocab % c.tp == 0), _vocabulary_sentence),
        Rule(("data_parallel", "pp", "schedule", "ep"), _ddp_supported, _ddp_sentence),
        Rule(
            ("offload", "zero_shards", "dp", "cp"),
            lambda job, c: np.asarray(~c.is_("offload", "parameters") | (c.shards > 1)),
            lambda job, x: "layout.offload = parameters keeps shards on the host, and one rank has none: try offload=optimizer",
        ),
        Rule(("cp", "context_parallel"), _keeps_sliding_window, _sliding_window_sentence),
        Rule(("cp", "tp"), _recurrence_has_heads, _recurrence_sentence),
        Rule(("ep", "dp", "cp"), lambda job, c: np.asarray(c.data_ranks % c.ep == 0), _experts_sentence),
        Rule(
            ("ep", "zero", "zero_shards"),
            lambda job, c: np.asarray((c.zero == 0) | (c.shards % c.ep == 0)),
            lambda job, x: (
                f"layout.zero_shards is {x.zero_shards} but must be a multiple of ep = {x.ep}: try zero_shards={x.ep} or null"
            ),
        ),
    ),
    "megatron": (
        Rule(
            ("recompute", "recompute_layers"),
            lambda job, c: np.asarray((c.recompute_layers == 0) | c.is_("recompute", "full")),
            lambda job, x: (
                f"layout.recompute_layers is {x.recompute_layers} with recompute = {x.recompute} but Megatron-LM recomputes "
                "some layers only in full: try recompute=full, or recompute_layers=null"
            ),
        ),
    ),
    "torchtitan": (
        Rule(
            ("zero", "dp", "cp", "tp", "pp", "ep"),
            # DDP runs alone: without FSDP there is no other axis (its parallelize functions raise).
            lambda job, c: np.asarray((c.zero == 3) | (c.data_ranks == 1) | ((c.cp * c.tp * c.pp * c.ep) == 1)),
            lambda job, x: f"layout.zero is {x.zero} but torchtitan cuts models only beside FSDP: try zero=3",
        ),
        Rule(
            ("zero_shards", "cp"),
            lambda job, c: np.asarray(c.shards % c.cp == 0),
            lambda job, x: (
                f"layout.zero_shards is {x.zero_shards} but torchtitan shards over all of cp = {x.cp}: try {x.cp} or null"
            ),
        ),
        Rule(
            ("ep", "zero_shards", "tp"),
            lambda job, c: np.asarray((c.ep == 1) | (c.shards * c.tp % c.ep == 0)),
            lambda job, x: f"layout.ep is {x.ep} but must divide the {x.shards} ranks of FSDP times tp = {x.tp}: try 1",
        ),
        Rule(("etp", "ep", "tp", "dp", "cp"), _torchtitan_cuts_experts, _torchtitan_experts_sentence),
        Rule(
            ("schedule", "virtual_stages", "pp"),
            _torchtitan_splits_layers,
            lambda job, x: (
                f"layout.virtual_stages is {x.virtual_stages} with {x.schedule} but torchtitan cannot cut {job.model.layers} "
                f"layers so: try {int(torchtitan_default_stages(LayoutColumns.of([x]))[0])}"
            ),
        ),
    ),
    "accelerate": (
        Rule(
            ("zero", "tp", "cp"),
            lambda job, c: np.asarray((c.zero == 3) | ((c.tp == 1) & (c.cp == 1))),
            lambda job, x: f"layout.zero is {x.zero} but Accelerate cuts tensors and sequences only beside FSDP: try zero=3",
        ),
    ),
}
