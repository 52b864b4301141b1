"""The layouts that `verify` runs: every combination for a number of processes, or a plan reduced to seconds. No torch.

Axes (expert parallelism too), ZeRO stage, schedule and kind of context parallelism are crossed in full. The rest (sequence
parallelism, recomputation, kind of data parallelism, HSDP, micro-batch) takes turns, so that each value meets many others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any, get_args

from ultrascale.schedules import DEFAULT_SCHEDULE, REGISTRY
from ultrascale.specs.blocks import MoE
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError, divisors, nearest
from ultrascale.specs.job import Job, Precision
from ultrascale.specs.layout import DEGREES, ContextParallel, Layout, Recompute
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan
from ultrascale.specs.training import Training
from ultrascale.train.request import Overrides, from_plan
from ultrascale.train.supported import factors, that_run

TECHNIQUES = (*DEGREES, "zero", "recompute")
_CONTEXT, _RECOMPUTE = get_args(ContextParallel), get_args(Recompute)
_DATA = ("bucketed", "hooks", "naive", "ddp")


def compositions(job: Job, world: int, only: Sequence[str] = ()) -> list[Layout]:
    """Every legal layout of `world` processes; `only`: those that use all of these techniques."""
    for word in only:
        if word not in TECHNIQUES:
            raise SpecError(f"--only names '{word:.40}': {nearest(word, TECHNIQUES)}")
    candidates = [layout for axes in factors(world) for layout in _layouts_of_axes(job, axes)]
    runs = set(that_run(job, candidates, Training()))
    # Where DDP does not work, buckets do.
    candidates = [one if one in runs or one.data_parallel != "ddp" else _bucketed(one) for one in candidates]
    found = dict.fromkeys(that_run(job, candidates, Training()))
    return [layout for layout in found if all(_uses(layout, word) for word in only)]


def _bucketed(layout: Layout) -> Layout:
    return layout.model_copy(update={"data_parallel": "bucketed"})


def _layouts_of_axes(job: Job, axes: tuple[int, int, int, int]) -> Iterable[Layout]:
    dp, tp, pp, cp = axes
    schedules = tuple(REGISTRY) if pp > 1 else (DEFAULT_SCHEDULE,)
    contexts = _CONTEXT if cp > 1 else ("zigzag",)
    stages = range(4) if dp * cp > 1 else range(1)
    alone = sum(size > 1 for size in axes) == 1  # with one axis, the rest is crossed in full as well
    for turn, (ep, zero, schedule, context) in enumerate(product(_expert_ranks(job, dp * cp), stages, schedules, contexts)):
        turn += 3 * dp + 5 * tp + 7 * pp + 11 * cp  # start at another value for each combination of axes
        variants = _DATA if zero == 0 and dp * cp > 1 else ("bucketed",)
        rests = product(_RECOMPUTE, (True, False) if tp > 1 else (True,), variants)
        for recompute, sp, variant in (
            rests if alone else [(_RECOMPUTE[turn % 3], bool(turn % 2) or tp == 1, variants[turn % len(variants)])]
        ):
            hsdp = zero and dp * cp >= 4 and dp * cp // 2 % ep == 0 and turn % 4 == 1
            fields: dict[str, Any] = {"schedule": schedule, "virtual_stages": REGISTRY[schedule].least_stages}
            fields |= {"context_parallel": context, "sequence_parallel": sp, "recompute": recompute, "data_parallel": variant}
            fields |= {"zero_shards": dp * cp // 2 if hsdp else None, "keep_gathered": zero == 3 and turn % 5 == 0}
            fields["recompute_layers"] = 1 if recompute != "none" and turn % 2 else None
            yield _with_batch(job, Layout(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, zero=zero, **fields))


def _expert_ranks(job: Job, data_ranks: int) -> list[int]:
    moe = job.model.moe
    return [1] if moe is None else [ep for ep in divisors(data_ranks) if moe.experts % ep == 0]


def _with_batch(job: Job, layout: Layout) -> Layout:
    """As few micro-batches as accumulation or the schedule needs: more would repeat these."""
    each = job.sequences // layout.dp
    least = max(2, layout.pp * max(1, REGISTRY[layout.schedule].least_rounds)) if layout.pp > 1 else 2
    gas = next((count for count in divisors(max(1, each)) if count >= least), max(1, each))
    return layout.model_copy(update={"mbs": max(1, each // gas), "gas": gas})


def _uses(layout: Layout, technique: str) -> bool:
    value = getattr(layout, technique)
    return bool(value != "none") if technique == "recompute" else value > (0 if technique == "zero" else 1)


def pairwise_sample(layouts: Sequence[Layout], most: int) -> list[Layout]:
    """A few layouts that together cover as many pairs of values as possible: greedy pairwise testing."""
    uncovered = {layout: _pairs(layout) for layout in layouts}
    selected: list[Layout] = []
    while uncovered and len(selected) < most:
        best = max(uncovered, key=lambda layout: len(uncovered[layout]))
        covered = uncovered.pop(best)
        selected.append(best)
        for pairs in uncovered.values():
            pairs -= covered
    return selected


def _pairs(layout: Layout) -> set[tuple[Any, ...]]:
    """Pairs of values that have an effect: the schedule of one stage, or the ring of one rank, has none."""
    idle = {
        "mbs": True,
        "gas": True,
        "schedule": layout.pp == 1,
        "virtual_stages": layout.pp == 1,
        "context_parallel": layout.cp == 1,
        "sequence_parallel": layout.tp == 1,
        "data_parallel": layout.zero > 0 or layout.data_ranks == 1,
    }
    return set(combinations(sorted((name, value) for name, value in layout.model_dump().items() if not idle.get(name)), 2))


MAX_PROCESSES = 16
MAX_SEQUENCES = 32  # per data rank
MAX_PARAMETERS = 5_000_000  # parameters of a model that is verified as it is
DEFAULT_LAYOUTS = 24  # layouts that `verify --world` tries without --all
ENGINES = ("torchtitan", "megatron")  # other engines, with a runner in measure/verify_ENGINE.py


def to_verify(
    words: list[str],
    world: int | None,
    only: str | None,
    everything: bool,
    model: str,
    precision: str = "fp32",
    few_layers: bool = False,
) -> tuple[Job, list[Layout], tuple[str, ...]]:
    """A plan and its changes, or layouts of `world` processes: the job, its layouts, and notes on what was reduced."""
    if world is None:
        plan, changes = Plan.load(words[0]), Overrides.parse(words[1:])
        request = from_plan(plan, changes, plan.layout.changed(**changes.layout).gpus)
        job, layout, notes = reduced(request.job, request.layout, _check_precision(precision), few_layers)
        return job, [layout], notes
    if not 1 <= world <= MAX_PROCESSES:
        raise SpecError(f"--world is {world} but must be from 1 to {MAX_PROCESSES}, such as 8")
    shape = Model.load(model)
    if shape.parameters > MAX_PARAMETERS:
        raise SpecError(f"--model is {model} with {shape.parameters:,} parameters, too many to try every layout: try tiny")
    sequences = 16 if 16 % world == 0 else 4 * world
    job = small_job(shape, world, sequences=sequences, precision=_check_precision(precision))
    layouts = compositions(job, world, [word.strip() for word in only.split(",") if word.strip()] if only else [])
    if not layouts:
        raise SpecError(f"no layout of {world} processes uses {only}: try --world 8, or fewer words in --only")
    return job, layouts if everything else pairwise_sample(layouts, DEFAULT_LAYOUTS), ()


def _check_precision(precision: str) -> str:
    if precision not in get_args(Precision):
        raise SpecError(f"--precision is '{precision:.20}' but must be one of {', '.join(get_args(Precision))}: try fp32")
    return precision


def small_job(model: Model, world: int, seq: int = 64, sequences: int = 16, precision: str = "fp32") -> Job:
    """A job for `verify`: a short sequence, a small batch."""
    return Job(model=model, cluster=Cluster.load(f"{world}xh100"), seq=seq, batch_tokens=seq * sequences, precision=precision)


def reduced(job: Job, layout: Layout, precision: str = "fp32", few_layers: bool = False) -> tuple[Job, Layout, tuple[str, ...]]:
    """A plan at sizes that this machine runs in seconds, and notes on what was reduced.

    Axes, stages, schedule and variants stay: the layout is verified, not the model's width. `few_layers`: one in each virtual
    stage and at least two, for other engines: 32 layers of torchtitan on eight ranks of two cores did not end within 200 s.
    """
    notes = []
    model = job.model
    if few_layers and model.layers > (layers := max(2, layout.pp * layout.virtual_stages)):
        model = model.model_copy(update={"layers": layers})
        notes.append(f"{layers} layers instead of {job.model.layers}")
    if job.model.parameters > MAX_PARAMETERS:
        model = _narrow_model(model, layout.tp, layout.ep)
        widths = f"hidden {model.hidden}, ffn {model.ffn}, vocab {model.vocab}"
        if model.moe is not None:
            widths += f", {model.moe.experts} experts of {model.moe.expert_ffn}"
        notes.append(f"{job.model.name} at {widths}; {'heads' if notes else 'layers and heads'} as they are")
    cut = layout
    if layout.gpus > MAX_PROCESSES:
        dp = max(1, min(layout.dp, MAX_PROCESSES // (layout.tp * layout.pp * layout.cp)))
        cut = layout.model_copy(update={"dp": dp, "ep": math.gcd(layout.ep, dp * layout.cp), "zero_shards": None})
        if cut.gpus > MAX_PROCESSES:
            raise SpecError(
                f"layout.tp·pp·cp is {layout.tp}·{layout.pp}·{layout.cp} = {layout.gpus // layout.dp}, but verify starts at "
                f"most {MAX_PROCESSES} processes on one machine: try smaller ones, such as layout.pp=2"
            )
        notes.append(f"dp {cut.dp} instead of {layout.dp}: more replicas compute what these do")
        if cut.ep != layout.ep:
            notes.append(f"ep {cut.ep} instead of {layout.ep}")
    if layout.mbs * layout.gas > MAX_SEQUENCES:
        gas = min(layout.gas, max(2 * layout.pp, 2))
        cut = cut.model_copy(update={"mbs": 1, "gas": gas})
        notes.append(f"{gas} micro-batches of one sequence instead of {layout.gas} of {layout.mbs}")
    seq = min(job.seq, max(64, 8 * layout.cp * layout.tp))
    if seq < job.seq:
        notes.append(f"sequences of {seq} tokens instead of {job.seq:,}")
    if job.precision != precision:
        other = "" if few_layers else f" (--precision {job.precision} verifies that, within wider bounds)"
        notes.append(f"{precision} instead of {job.precision}{other}")
    return small_job(model, cut.gpus, seq, cut.dp * cut.mbs * cut.gas, precision), cut, tuple(notes)


def _narrow_model(model: Model, tp: int, ep: int) -> Model:
    width = 64 * tp
    learned: dict[str, Any] = {"max_positions": min(model.max_positions or 4096, 4096)} if model.positions == "learned" else {}
    sizes = {"hidden": 64, "head_dim": 8, "ffn": 2 * width, "vocab": -(-256 // tp) * tp}
    if model.moe is not None:
        learned["moe"] = _fewer_experts(model.moe, ep, 8 * tp)
        sizes["ffn"] = sizes["ffn"] if model.dense_layers else 0
    return model.model_copy(update={"name": f"narrow {model.name}", **sizes, **learned})


def _fewer_experts(moe: MoE, ep: int, width: int) -> MoE:
    """Enough experts for top_k and ep, and some more."""
    experts = min(moe.experts, ep * -(-2 * moe.top_k // ep))
    shared = {"shared_expert_ffn": width} if moe.shared_experts else {}
    return moe.model_copy(update={"experts": experts, "expert_ffn": width, **shared})
