"""Why the winner wins: the playbook's three steps, each rule with the number that decided it, and the neighbours it beat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from ultrascale.cost.engines import problem
from ultrascale.cost.estimate import DraftEstimate, drafts, estimate
from ultrascale.cost.memory.states import compute_bytes, gradient_bytes, trained_fraction
from ultrascale.plan.candidates import LayoutConstraints, Objective
from ultrascale.schedules import DEFAULT_SCHEDULE, REGISTRY, legal
from ultrascale.specs.errors import SpecError
from ultrascale.specs.estimate import CAUSES, Estimate
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Dispatcher, Layout
from ultrascale.specs.plan import Neighbour
from ultrascale.specs.units import GIB, count, seconds

CAUSE_WORDS = {
    "matmul_s": "GEMMs",
    "attention_s": "attention",
    "memory_bound_s": "memory-bound operators",
    "recompute_s": "recomputation",
    "launch_s": "kernel launches",
    "tensor_s": "TP communication (exposed)",
    "context_s": "CP communication (exposed)",
    "expert_s": "EP all-to-all (exposed)",
    "zero_s": "ZeRO communication (exposed)",
    "data_s": "gradient reduction (exposed)",
    "send_s": "pipeline sends (exposed)",
    "bubble_s": "pipeline bubble",
    "optimizer_s": "optimizer",
    "offload_s": "offload",
    "overhead_s": "host overhead",
}


MAIN_OF_STEP = {"Fit": 2, "Batch": 1, "Speed": 2}  # reasons of a step that are shown first
MAIN_REASONS = sum(MAIN_OF_STEP.values())


def with_batch(job: Job, layout: Layout, **fields: Any) -> Layout | None:
    """The layout with some fields changed, and dp, gas and the schedule following; None when that cannot be done."""
    values = {**layout.model_dump(), **fields}
    rest = values["tp"] * values["pp"] * values["cp"]
    if "dp" not in fields:
        if job.cluster.gpus % rest:
            return None
        values["dp"] = job.cluster.gpus // rest
    if "gas" not in fields:
        if job.sequences % (values["dp"] * values["mbs"]):
            return None
        values["gas"] = job.sequences // (values["dp"] * values["mbs"])
    values.update({name: value for name, value in _dependent_changes(job, values) if name not in fields})
    try:
        return layout.changed(**values)
    except SpecError:
        return None


def _dependent_changes(job: Job, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What has to follow a change so that the layout stays legal; never what was asked for itself."""
    pp, loops = values["pp"], values["virtual_stages"]
    if pp == 1 or legal(values["schedule"], pp, values["gas"], loops) is not None or pp * loops > job.model.layers:
        yield from (("schedule", DEFAULT_SCHEDULE), ("virtual_stages", 1))
    if values["zero"] == 0 or (values["zero_shards"] and (values["dp"] * values["cp"]) % values["zero_shards"]):
        yield "zero_shards", None
    if values["zero"] != 3:
        yield "keep_gathered", False
    if values["recompute"] == "none" or (values["recompute_layers"] or 0) * pp * loops > job.model.layers:
        yield "recompute_layers", None


def _steps(job: Job, layout: Layout) -> Iterator[dict[str, Any]]:
    """One step in every field: twice and half of each degree, each stage, policy and schedule beside the chosen one."""
    for axis, on in (("tp", True), ("pp", True), ("cp", True), ("ep", job.model.moe is not None), ("mbs", True)):
        value = getattr(layout, axis)
        if on:
            yield {axis: value * 2}
        if on and value % 2 == 0:
            yield {axis: value // 2}
    if layout.data_ranks > 1:
        yield from ({"zero": level} for level in range(4) if level != layout.zero)
        if layout.zero == 3:
            yield {"keep_gathered": not layout.keep_gathered}
            local = max(1, job.cluster.fast_domain // layout.tp)
            if 1 < local < layout.data_ranks and layout.zero_shards is None:
                yield {"zero_shards": local}
    if layout.ep > 1:
        yield from ({"dispatcher": word} for word in get_args(Dispatcher) if word != layout.dispatcher)
    yield from ({"recompute": word} for word in ("none", "selective", "full") if word != layout.recompute)
    if layout.tp > 1 and layout.sequence_parallel:
        yield {"sequence_parallel": False}
    if layout.cp > 1:
        yield from (
            {"context_parallel": word} for word in ("zigzag", "allgather", "ulysses") if word != layout.context_parallel
        )
    if layout.pp > 1:
        beside = [spec for spec in REGISTRY.values() if not spec.holds_all]  # which 1F1B beats by construction
        pairs = [(spec.name, v) for spec in beside for v in (spec.least_stages, 2 * spec.least_stages) if spec.takes(v)]
        for name, loops in dict.fromkeys([*pairs, (layout.schedule, layout.virtual_stages * 2)]):
            if (name, loops) != (layout.schedule, layout.virtual_stages):
                yield {"schedule": name, "virtual_stages": loops}


def neighbours(job: Job, layout: Layout, baseline: Estimate) -> tuple[Neighbour, ...]:
    """Every legal layout one step away, with what it costs; fastest first among those that fit."""
    changes: dict[Layout, dict[str, Any]] = {}
    for fields in _steps(job, layout):
        other = with_batch(job, layout, **fields)
        if other is not None and other != layout and other not in changes and problem(job, other) is None:
            changes[other] = fields
    found = [
        Neighbour(
            change=_change_words(layout, other, fields),
            layout=other,
            step_time_s=predicted.step_time_s,
            peak_gib=predicted.peak_gib,
            fits=predicted.fits,
            verdict=_verdict(baseline, predicted),
        )
        for (other, fields), predicted in zip(changes.items(), drafts(job, list(changes)), strict=True)
    ]
    return tuple(sorted(found, key=lambda n: (not n.fits, n.step_time_s)))


def _change_words(layout: Layout, other: Layout, fields: dict[str, Any]) -> str:
    changed = ", ".join(f"{name}={value}" for name, value in fields.items())
    implied = [
        f"{name}={getattr(other, name)}"
        for name in Layout.model_fields
        if name not in fields and getattr(other, name) not in (getattr(layout, name), None)  # None: the usual value
    ]
    return f"{changed} ({', '.join(implied)})" if implied else changed


def _verdict(baseline: Estimate, other: Estimate | DraftEstimate) -> str:
    slower = other.step_time_s / baseline.step_time_s - 1
    if not other.fits:
        return (
            f"does not fit: {other.peak_gib:,.1f} GiB of {other.capacity_gib:,.1f} on stage {other.peak_stage} "
            f"(would be {slower:+.1%} in time)"
        )
    cause, difference = largest_difference(baseline, other)
    saved = other.peak_gib - baseline.peak_gib
    if abs(slower) < 0.0005:
        return f"same time, {saved:+,.1f} GiB"
    change = f"{slower:+.1%}" if slower < 3 else f"{slower + 1:,.0f} times the time"
    return f"{change} per step (mostly {CAUSE_WORDS[cause]} {difference:+.2f} s), {saved:+,.1f} GiB"


def largest_difference(baseline: Estimate, other: Estimate | DraftEstimate) -> tuple[str, float]:
    """The cause that moved most in the direction in which the total moved."""
    sign = 1 if other.step_time_s >= baseline.step_time_s else -1
    differences = {cause: getattr(other.time, cause) - getattr(baseline.time, cause) for cause in CAUSES}
    cause = max(differences, key=lambda name: sign * differences[name])
    return cause, differences[cause]


def against_winner(
    winner: tuple[Job, Layout, Estimate], other: tuple[Job, Layout, Estimate], objective: Objective
) -> tuple[str, ...]:
    """One sentence: what the runner-up loses, and where."""
    best, this = winner[2], other[2]
    if objective == "memory":
        return (f"{this.peak_gib - best.peak_gib:+,.2f} GiB against the best, {seconds(this.step_time_s)} per step",)
    if objective == "cost":
        ratio = (other[0].cluster.gpus / this.tokens_per_s) / (winner[0].cluster.gpus / best.tokens_per_s) - 1
        return (f"{ratio:+.1%} GPU time per token against the best, on {other[0].cluster.gpus} GPUs",)
    return (f"against the best: {_verdict(best, this)}",)


def of_winner(
    job: Job,
    layout: Layout,
    predicted: Estimate,
    rejected: tuple[Neighbour, ...],
    objective: Objective,
    constraints: LayoutConstraints,
) -> tuple[str, ...]:
    """In the playbook's order: make it fit, reach the batch, go fast. Each starts with the name of its step; the first
    `MAIN_REASONS` matter most.
    """
    by_change = {neighbour.change.split(" ")[0].rstrip(","): neighbour for neighbour in rejected}
    steps = (
        ("Fit", list(_fit(job, layout, predicted, by_change))),
        ("Batch", list(_batch(job, layout))),
        ("Speed", list(_speed(job, layout, predicted, by_change, rejected, objective))),
    )
    main = [f"{step}: {text}" for step, texts in steps for text in texts[: MAIN_OF_STEP[step]]]
    rest = [f"{step}: {text}" for step, texts in steps for text in texts[MAIN_OF_STEP[step] :]]
    return (*main, *rest, *(f"Constraint: {name}={value} was fixed" for name, value in constraints.fixed.items()))


def _fit(job: Job, layout: Layout, predicted: Estimate, by_change: dict[str, Neighbour]) -> Iterator[str]:
    size, world, capacity = job.model.parameters, job.cluster.gpus, predicted.capacity_gib
    one = estimate_alone_gib(job)
    beside = "" if job.adapter_rank is None else f", frozen beside adapters of rank {job.adapter_rank},"
    yield (
        f"{count(size)} parameters{beside} with their states need {_size(one, digits=0)} on one GPU of {_size(capacity)}: "
        + ("one GPU could hold them" if one <= capacity else f"shard over ≥ {-(-one // capacity):.0f} GPUs")
    )
    yield (
        f"peak is {_size(predicted.peak_gib)} of {_size(capacity)} on stage {predicted.peak_stage} "
        f"({_size(predicted.headroom_gib)} free), at the {predicted.peak_moment}"
        + (f"; it {predicted.cache_flush}" if predicted.cache_flush else "")
    )
    for change, label in (("zero=0", "without ZeRO"), ("recompute=none", "without recomputation")):
        if (other := by_change.get(change)) and not other.fits:
            yield f"{label} it would need {other.peak_gib:,.1f} GiB: {other.peak_gib - capacity:,.1f} GiB too much"
    yield _playbook_rule(job, layout, world)
    if layout.recompute == "none":
        yield "no recomputation is needed: activations fit as they are"


def _size(gib: float, digits: int = 1) -> str:
    """Of a small model hundredths of a GiB would say nothing."""
    return f"{gib:,.{digits}f} GiB" if gib >= 1 else f"{gib * 1024:,.0f} MiB"


def estimate_alone_gib(job: Job) -> float:
    """Parameters, and of those that are trained master, gradients and optimizer states (no activations), in GiB."""
    master = 4 if job.precision != "fp32" else 0
    trained = master + gradient_bytes(job) + job.state_bytes
    return job.model.parameters * (compute_bytes(job) + trained_fraction(job) * trained) / GIB


def _playbook_rule(job: Job, layout: Layout, world: int) -> str:
    """The rule of the cheat-sheet that speaks for this size, and whether the search agrees."""
    techniques = [f"{axis}={getattr(layout, axis)}" for axis in ("tp", "pp", "cp", "ep") if getattr(layout, axis) > 1]
    if layout.zero:
        techniques.append(f"ZeRO-{layout.zero}")
    selected = " + ".join(techniques) or "plain data parallelism"
    if world == 1:
        return f"rule for one GPU: recomputation and accumulation are all there is; the search took {selected}"
    if job.model.moe is not None:
        rule = "mixture of experts: use expert parallelism"
    elif job.seq > 32_768:
        rule = "long context: use context parallelism"
    elif world >= 1024:
        rule = "1024+ GPUs: TP=8 with ZeRO-2 data parallelism and PP"
    elif world >= 512:
        rule = "512+ GPUs: no pure ZeRO-3, combine with TP or PP"
    elif job.model.parameters < 10e9:
        rule = "below 10B parameters: one technique, TP or ZeRO-3, on 8 GPUs"
    else:
        rule = "10B and more: TP=8 with PP, or TP=8 with ZeRO-3, or pure ZeRO-3"
    return f"the playbook's rule here is «{rule}»; the search over all legal layouts found {selected} fastest within memory"


def _batch(job: Job, layout: Layout) -> Iterator[str]:
    yield (
        f"{job.batch_tokens:,} tokens = {job.sequences:,} sequences of {job.seq:,} = "
        f"mbs {layout.mbs} × dp {layout.dp} × gas {layout.gas}"
    )
    if job.batch_tokens < 2**22 and job.cluster.gpus >= 64:
        yield "the playbook's sweet spot is 4 to 60 million tokens: a larger batch would leave more to overlap and pipeline"
    if layout.pp > 1:
        fill = (layout.pp - 1) / (layout.gas * layout.virtual_stages)
        yield f"{layout.gas} micro-batches fill {layout.pp} stages: textbook bubble (p−1)/(v·m) = {fill:.1%} of the work"


def _speed(
    job: Job,
    layout: Layout,
    predicted: Estimate,
    by_change: dict[str, Neighbour],
    rejected: tuple[Neighbour, ...],
    objective: Objective,
) -> Iterator[str]:
    costs = sorted(((getattr(predicted.time, cause), cause) for cause in CAUSES), reverse=True)
    top = ", ".join(f"{CAUSE_WORDS[cause]} {cost / predicted.step_time_s:.0%}" for cost, cause in costs[:4] if cost > 0)
    # A CPU's rate was measured, its peak is not known: utilisation would be of a guess.
    utilisation = f" (MFU {predicted.mfu_causal:.1%}, causal attention, {job.precision} peak)"
    used = "" if job.cluster.efficiency.synchronous else utilisation
    yield f"a step takes {seconds(predicted.step_time_s)}{used}: {top}"
    yield from _network(job, layout, predicted)
    if objective == "throughput":
        better = [n for n in rejected if not n.fits and n.step_time_s < predicted.step_time_s]
        if better:
            best = min(better, key=lambda n: n.step_time_s)
            gain, over = 1 - best.step_time_s / predicted.step_time_s, best.peak_gib - predicted.capacity_gib
            yield f"memory is what stops more: {best.change} would save {gain:.1%} but is {over:,.1f} GiB over"
    yield from _dispatcher(layout, by_change)
    for axis, label in (("tp", "TP"), ("pp", "PP"), ("cp", "CP"), ("ep", "EP"), ("mbs", "micro-batch")):
        value, twice = getattr(layout, axis), 2 * getattr(layout, axis)
        over_network = f"leaves the NVLink domain for {job.cluster.network_gb_s:g} GB/s per GPU and "
        leaves = over_network if axis == "tp" and twice > job.cluster.fast_domain >= value else ""
        if (up := by_change.get(f"{axis}={twice}")) is not None:
            yield f"{label} stays at {value}: at {twice} it {leaves}{_costs(up)}"
        elif axis == "tp" and twice <= job.cluster.gpus:
            yield f"TP stays at {value}: {_why_not_tp(job, layout, twice)}"
        if value > 1 and (down := by_change.get(f"{axis}={value // 2}")) is not None:
            yield f"{label} is not less: at {value // 2} it {_costs(down)}"
    for level in range(4):
        if (other := by_change.get(f"zero={level}")) is not None:
            yield f"ZeRO-{layout.zero} rather than {level}: {level} {_costs(other)}"
    if (
        layout.pp > 1
        and layout.schedule != DEFAULT_SCHEDULE
        and (plain := by_change.get(f"schedule={DEFAULT_SCHEDULE}")) is not None
    ):
        chunks = f"{layout.virtual_stages} stages per rank" if layout.virtual_stages > 1 else "one stage per rank"
        yield f"schedule {layout.schedule} with {chunks}: 1F1B {_costs(plain)}"


def _network(job: Job, layout: Layout, predicted: Estimate) -> Iterator[str]:
    """What a network that is slower or faster than its data sheet changes for this layout."""
    rate, usual = job.cluster.network_gb_s, job.cluster.gpu.network_gb_s
    if rate == usual or job.cluster.gpus <= job.cluster.fast_domain:
        return
    there = estimate(job.with_network_gb_s(usual), layout)
    yield (
        f"the network carries {rate:g} GB/s per GPU: at the usual {usual:g} this layout would take "
        f"{seconds(there.step_time_s)} per step ({there.step_time_s / predicted.step_time_s - 1:+.1%})"
    )


def _dispatcher(layout: Layout, by_change: dict[str, Neighbour]) -> Iterator[str]:
    if (plain := by_change.get("dispatcher=alltoall")) is not None:
        yield f"dispatcher {layout.dispatcher}, which must be installed: NCCL's all-to-all {_costs(plain)}"


def _why_not_tp(job: Job, layout: Layout, tp: int) -> str:
    """Why no neighbour has this degree."""
    rest, gpus = tp * layout.pp * layout.cp, job.cluster.gpus
    if gpus % rest:
        return f"tp {tp} × pp {layout.pp} × cp {layout.cp} = {rest} does not divide {gpus} GPUs"
    other = with_batch(job, layout, tp=tp)
    if other is None:
        return f"with tp {tp}, {job.sequences} sequences do not divide over dp {gpus // rest} × mbs {layout.mbs}"
    return problem(job, other) or f"tp {tp} is the same layout"


def _costs(other: Neighbour) -> str:
    if not other.fits:
        return f"does not fit ({other.peak_gib:,.1f} GiB)"
    if other.verdict.startswith("same"):
        return "changes nothing in time, " + other.verdict.split(", ")[-1]
    if "times the time" in other.verdict:
        return "takes " + other.verdict
    return ("costs " if other.verdict.startswith("+") else "gives ") + other.verdict
