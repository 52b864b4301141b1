"""One change at a time: what does it cost, what does it save; and how far a layout goes before it no longer fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ultrascale.cost.engines import problem
from ultrascale.cost.estimate import estimate
from ultrascale.plan.reasons import with_batch
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.estimate import OWNERS, Estimate
from ultrascale.specs.gpu import GPU
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout, field_value
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import count, tokens
from ultrascale.specs.validate import build

JOB_FIELDS = (
    "seq",
    "batch_tokens",
    "precision",
    "gradients",
    "optimizer",
    "ema",
    "attention",
    "dropout",
    "adapter_rank",
    "gpus",
    "gpu",
    "network_gb_s",
    "expert_imbalance",
)
_NUMBERS = {
    "network_gb_s": "GB/s per GPU, such as 25",
    "expert_imbalance": "the busiest expert rank's tokens over the mean, such as 1.1",
}
AXES: tuple[str, ...] = ("mbs", "seq", "model")


@dataclass(frozen=True)
class WhatIf:
    """A change beside today's plan; `estimate` is None when the change is not legal, and `problem` says why."""

    change: str
    job: Job
    layout: Layout | None
    estimate: Estimate | None
    problem: str | None


def what_if(plan: Plan, change: str) -> WhatIf:
    """`zero=3`, `recompute=selective,mbs=4`, `gradients=bf16`, `gpus=128`: any field of the layout, and some of the job."""
    layout_fields: dict[str, Any] = {}
    job_fields: dict[str, Any] = {}
    for word in [part.strip() for part in change.split(",") if part.strip()]:
        name, equals, value = word.partition("=")
        if not equals or not value.strip():
            raise SpecError(f"--what-if '{word:.60}' must be a field and a value, such as --what-if zero=3")
        name = name.strip()
        if name in layout_fields or name in job_fields:
            raise SpecError(f"--what-if {change} gives {name} twice: keep one, or ask with a second --what-if")
        if name in Layout.model_fields:
            layout_fields[name] = field_value(name, value)
        elif name in JOB_FIELDS:
            job_fields[name] = _job_value(name, value.strip())
        else:
            raise SpecError(f"--what-if has no field '{name}': {nearest(name, [*Layout.model_fields, *JOB_FIELDS])}")
    if not layout_fields and not job_fields:
        raise SpecError("--what-if is empty: name a field and a value, such as --what-if zero=3")
    job = _changed_job(plan.job, job_fields)
    layout = with_batch(job, plan.layout, **layout_fields)
    if layout is None:
        dp = layout_fields.get("dp", plan.layout.dp)
        sentence = f"{job.cluster.gpus} GPUs and {job.sequences} sequences cannot be cut so (dp={dp})"
        return WhatIf(change, job, None, None, sentence)
    refusal = problem(job, layout)
    return WhatIf(change, job, layout, None if refusal else estimate(job, layout), refusal)


def _job_value(name: str, text: str) -> Any:
    if name in ("seq", "batch_tokens"):
        return tokens(text, name, "8192 or 8k" if name == "seq" else "4M or 4194304")
    if name == "gpus":
        return tokens(text, name, "gpus=128")
    if name == "gpu":
        return GPU.load(text)
    if name in _NUMBERS:
        try:
            return float(text)
        except ValueError:
            raise SpecError(f"--what-if {name} is '{text:.40}' but must be {_NUMBERS[name]}") from None
    return {"true": True, "false": False}.get(text.lower(), text)


def _changed_job(job: Job, fields: dict[str, Any]) -> Job:
    fields = dict(fields)
    if "gpus" in fields:
        fields["cluster"] = job.cluster.resized(fields.pop("gpus"))
    cluster = fields.get("cluster", job.cluster)
    if "gpu" in fields:
        kind = fields.pop("gpu")
        # A network that is not the usual one of its GPUs was given or measured: it stays.
        own = {} if cluster.network_gb_s == cluster.gpu.network_gb_s else {"network_gb_s": cluster.network_gb_s}
        fields["cluster"] = cluster = Cluster.of(kind, nodes=cluster.nodes, gpus_per_node=cluster.gpus_per_node, **own)
    if "seq" in fields and "batch_tokens" not in fields:
        whole = max(1, round(job.batch_tokens / fields["seq"]))
        fields["batch_tokens"] = whole * fields["seq"]
    imbalance, network = fields.pop("expert_imbalance", None), fields.pop("network_gb_s", None)
    changed = job.changed(**fields)
    changed = changed if network is None else changed.with_network_gb_s(network)
    return changed if imbalance is None else changed.with_expert_imbalance(imbalance)


@dataclass(frozen=True)
class LargestFit:
    """How far one axis goes: the largest value that fits, and what stops the next."""

    axis: str
    today: str
    largest: str
    estimate: Estimate
    stopped_by: str


def largest(plan: Plan, axis: str) -> LargestFit:
    """The largest micro-batch, sequence or model (same shape, more layers) that this layout still holds."""
    if axis not in AXES:
        raise SpecError(f"--largest is '{axis}' but must be one of {', '.join(AXES)}")
    attempt, unit, start = {
        "mbs": (_with_mbs, 1, plan.layout.mbs),
        "seq": (_with_seq, _seq_unit(plan), plan.job.seq),
        "model": (_with_layers, 1, plan.job.model.layers),
    }[axis]
    best = _bisect(lambda steps: attempt(plan, steps * unit), max(1, start // unit))
    if best is None:
        smallest = attempt(plan, unit)
        peak = "is not legal" if smallest is None else f"needs {smallest.peak_gib:,.1f} GiB of {smallest.capacity_gib:,.1f}"
        raise SpecError(
            f"--largest {axis}: nothing fits, even {_name(plan, axis, unit)} {peak}; try more GPUs or recompute=full"
        )
    value, fitting = best[0] * unit, best[1]
    beyond = attempt(plan, value + unit)
    stopped_by = _stop(plan, axis, fitting, beyond, value + unit)
    return LargestFit(axis, _name(plan, axis, start), _name(plan, axis, value), fitting, stopped_by)


def _bisect(attempt: Callable[[int], Estimate | None], start: int) -> tuple[int, Estimate] | None:
    """The largest whole number that fits, found by doubling and halving: memory never falls along these axes."""

    def fits(steps: int) -> Estimate | None:
        predicted = attempt(steps)
        return predicted if predicted is not None and predicted.fits else None

    low, found = 0, None
    high = start
    while (predicted := fits(high)) is not None and high < 2**26:
        low, found, high = high, predicted, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if (predicted := fits(middle)) is not None:
            low, found = middle, predicted
        else:
            high = middle
    return (low, found) if found is not None else None


def _try(job: Job, layout: Layout) -> Estimate | None:
    return estimate(job, layout) if problem(job, layout) is None else None


def _with_mbs(plan: Plan, mbs: int) -> Estimate | None:
    layout = plan.layout.changed(mbs=mbs)
    return _try(plan.job.changed(batch_tokens=layout.batch_tokens(plan.job.seq)), layout)


def _with_seq(plan: Plan, seq: int) -> Estimate | None:
    try:
        job = plan.job.changed(seq=seq, batch_tokens=plan.layout.batch_tokens(seq))
    except SpecError:  # learned positions end somewhere
        return None
    return _try(job, plan.layout)


def _with_layers(plan: Plan, layers: int) -> Estimate | None:
    model = plan.job.model
    if layers < plan.layout.pp * plan.layout.virtual_stages or layers > 65_536:
        return None
    bigger = build(Model, {**dict(model), "layers": layers, "name": f"{model.name} with {layers} layers"}, "model")
    return _try(plan.job.changed(model=bigger), plan.layout)


def _seq_unit(plan: Plan) -> int:
    """Sequences grow in steps that tp, cp and the zig-zag can cut, and of at least 128 tokens."""
    step = plan.layout.tp * plan.layout.cp * 2
    while step < 128:
        step *= 2
    return step


def _name(plan: Plan, axis: str, value: int) -> str:
    if axis == "model":
        model = build(Model, {**dict(plan.job.model), "layers": value}, "model")
        return f"{value} layers = {count(model.parameters)} parameters"
    return f"mbs = {value}" if axis == "mbs" else f"seq = {value:,} tokens"


def _stop(plan: Plan, axis: str, fitting: Estimate, beyond: Estimate | None, value: int) -> str:
    if beyond is None:
        return f"{_name(plan, axis, value)} is no longer a legal layout (it is not memory that stops it)"
    before, after = fitting.memory[fitting.peak_stage].memory, beyond.memory[beyond.peak_stage].memory
    grown = max(OWNERS, key=lambda owner: getattr(after, owner) - getattr(before, owner))
    biggest = max(OWNERS, key=lambda owner: getattr(after, owner))
    return (
        f"{_name(plan, axis, value)} needs {beyond.peak_gib:,.1f} GiB of {beyond.capacity_gib:,.1f} on stage "
        f"{beyond.peak_stage}: {grown} grow, {biggest} are the largest owner"
    )
