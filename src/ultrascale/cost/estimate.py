"""From a job and one layout to an Estimate: the laws on one row per pipeline rank, the pipeline simulated action by action."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ultrascale.cost import flops, kernels, operators, stages, traffic
from ultrascale.cost.columns import LayoutColumns, Passes
from ultrascale.cost.legality import check, legal_rows
from ultrascale.cost.memory import activations
from ultrascale.cost.memory.estimate import Peak, fragmentation, gathered_inputs, peaks, runtime
from ultrascale.cost.memory.states import selective_policy, uses_fused_blocks
from ultrascale.cost.operators import layer_matmuls
from ultrascale.cost.ranges import estimate_range
from ultrascale.cost.stages import LayoutRows, pipelines_s, views
from ultrascale.schedules import makespan
from ultrascale.specs.estimate import OWNERS, ActivationItem, Estimate, Memory, StageMemory, Time
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.units import GIB


@dataclass(frozen=True)
class MemoryDraft:
    """How full the stages of a layout are, which decides whether it is worth simulating."""

    view: LayoutRows
    at_peak: list[Peak]

    @cached_property
    def owned(self) -> list[dict[str, float]]:
        """Bytes of every stage, by owner."""
        return _owned(self.view, self.at_peak)

    @cached_property
    def _totals(self) -> list[float]:
        return [sum(each[owner] for owner in OWNERS) for each in self.owned]

    @property
    def peak_stage(self) -> int:
        return self._totals.index(max(self._totals))

    @property
    def peak_gib(self) -> float:
        return max(self._totals) / GIB

    @property
    def capacity_gib(self) -> float:
        return self.view.job.cluster.gpu.memory_gib

    @property
    def fits(self) -> bool:
        return max(self._totals) <= self.capacity_gib * GIB

    @property
    def reserved_gib(self) -> float:
        """What the allocator would reserve of one stage whose launches are ahead of the GPU.

        Inputs that were gathered on another stream and freed are not reused before the GPU is through with them
        (`record_stream`): those of a whole forward are held, in place of what fragmentation takes else.
        """
        job, row = self.view.job, self.view.row
        gathered = gathered_inputs(job, row) * job.model.layers - fragmentation(job, row) * self.at_peak[0].in_flight_bytes
        return float(self._totals[0] + gathered[0]) / GIB


@dataclass(frozen=True)
class DraftEstimate(MemoryDraft):
    """What ranks a layout: its time by cause and its fullest stage; `whole` adds what people want to know besides."""

    time: Time
    bubble_fraction: float
    cache_flush_s: float
    """of the step: the allocator's cache is freed and allocated again"""

    @property
    def step_time_s(self) -> float:
        return self.time.total

    @property
    def tokens_per_s(self) -> float:
        return self.view.layout.batch_tokens(self.view.job.seq) / self.step_time_s


def estimate(job: Job, layout: Layout) -> Estimate:
    """Memory by owner and stage, step time by cause, traffic, utilisation, cost. Raises SpecError for an illegal layout."""
    return full_estimate(drafts(job, [layout])[0])


def drafts(job: Job, layouts: Sequence[Layout]) -> list[DraftEstimate]:
    """Of each layout, all at once. Raises SpecError for an illegal one."""
    return add_times(memory_drafts(job, layouts))


def memory_drafts(job: Job, layouts: Sequence[Layout]) -> list[MemoryDraft]:
    """The memory of each, without its time."""
    if not legal_rows(job, LayoutColumns.of(layouts)).all():
        for layout in layouts:
            check(job, layout)
    return [MemoryDraft(view, peaks(view)) for view in views(job, layouts)]


def memory_drafts_of_jobs(layouts: Sequence[tuple[Job, Layout]]) -> list[MemoryDraft]:
    """The same of layouts of several jobs, in the order given; those of one job together."""
    found: dict[int, MemoryDraft] = {}
    for job in {id(job): job for job, _ in layouts}.values():
        numbers = [number for number, (one, _) in enumerate(layouts) if one is job]
        found.update(zip(numbers, memory_drafts(job, [layouts[number][1] for number in numbers]), strict=True))
    return [found[number] for number in range(len(layouts))]


def add_times(found: Sequence[MemoryDraft]) -> list[DraftEstimate]:
    """The same with their time, all pipelines simulated together, be they of one job or of several."""
    pipelines = [one.view for one in found if one.view.layout.pp > 1]
    took = iter(pipelines_s(pipelines))
    return [_timed(one, next(took) if one.view.layout.pp > 1 else 0.0) for one in found]


def _timed(one: MemoryDraft, pipeline_s: float) -> DraftEstimate:
    time, bubble_fraction = _time(one.view, pipeline_s)
    flush_s = _cache_flush_s(one, time)
    time = time.model_copy(update={"overhead_s": time.overhead_s + flush_s})
    return DraftEstimate(one.view, one.at_peak, time, bubble_fraction, flush_s)


def _cache_flush_s(one: MemoryDraft, time: Time) -> float:
    """What a step loses where the allocator would reserve more than the GPU has: it frees its cache and allocates anew.

    Only where the host is ahead: it waits for its neighbours in a pipeline, and behind its own launches nothing is held. Runs
    of a single micro-batch lose nothing (docs/lab.md).
    """
    job, layout = one.view.job, one.view.layout
    if not fragmentation(job, one.view.row).any() or layout.tp == 1 or layout.pp > 1 or time.launch_s > 0:
        return 0.0
    over_gib = max(0.0, one.reserved_gib - one.capacity_gib)
    return over_gib * one.view.machine.efficiency.cache_flush_s_per_gib * layout.gas


def full_estimate(draft: DraftEstimate) -> Estimate:
    view, time, step_s, rate = draft.view, draft.time, draft.step_time_s, draft.tokens_per_s
    job, layout, stage_memory = view.job, view.layout, _memory(draft)
    peak = stage_memory[draft.peak_stage]
    world = layout.gpus
    per_gpu = rate / world
    price = job.cluster.price_per_gpu_hour_usd
    days = job.total_tokens / rate / 86400 if job.total_tokens else None
    hours = days * 24 * world if days is not None else None
    # Before the optimizer's first step its states do not exist; then they do, and activations and buffers are freed.
    stepping = [one.memory.parameters + one.memory.master + one.memory.gradients + one.memory.optimizer for one in stage_memory]
    first_step = max(*stepping, *(one.memory.total - one.memory.optimizer for one in stage_memory))

    # Frozen weights have no gradients.
    left_out = 0.0 if job.adapter_rank is None else flops.matmul_flops(job.model) + flops.head_flops(job.model)

    def utilisation(flops_per_token: float) -> float:
        return per_gpu * (flops_per_token - left_out) / job.peak_flops

    def hardware(causal: bool) -> float:
        recomputed = stages.recomputed_fraction(job, layout)
        fused = bool(uses_fused_blocks(job, view.row)[0])
        # Megatron's core_attn repeats the scores, whatever its kernel.
        attention = "plain" if selective_policy(job) == "attention" else job.attention
        again = flops.hardware_flops(job.model, job.seq, layout.recompute, attention, causal, recomputed, fused)
        if layout.recompute == "selective":
            again += recomputed * operators.selective_flops(job, view.row)
        return again

    return Estimate(
        step_time_s=step_s,
        tokens_per_s=rate,
        tokens_per_s_per_gpu=per_gpu,
        mfu=utilisation(flops.model_flops(job.model, job.seq)),
        hfu=utilisation(hardware(causal=False)),
        mfu_causal=utilisation(flops.model_flops(job.model, job.seq, causal=True)),
        hfu_causal=utilisation(hardware(causal=True)),
        model_tflops_per_gpu=per_gpu * (flops.model_flops(job.model, job.seq) - left_out) / 1e12,
        peak_gib=draft.peak_gib,
        capacity_gib=draft.capacity_gib,
        fits=draft.fits,
        peak_stage=peak.stage,
        peak_moment=peak.moment,
        first_step_peak_gib=first_step / GIB,
        bubble_fraction=draft.bubble_fraction,
        memory=tuple(stage_memory),
        time=time,
        traffic=tuple(traffic.by_technique(job, layout, view.machine, time)),
        activations=tuple(_activation_items(view, draft.at_peak[peak.stage])),
        range=estimate_range(job, time, draft.peak_gib, draft.capacity_gib),
        train_days=days,
        gpu_hours=hours,
        cost_usd=hours * price if hours is not None and price is not None else None,
        cost_usd_per_billion_tokens=1e9 / rate / 3600 * world * price if price is not None else None,
        cache_flush=_cache_flush_words(draft),
        notes=tuple(view.machine.notes() + _range_notes(view)),
    )


def _cache_flush_words(draft: DraftEstimate) -> str:
    if not draft.cache_flush_s:
        return ""
    reserves = f"reserves {draft.reserved_gib:,.0f} GiB of the {draft.capacity_gib:,.0f} that the GPU has"
    lost = f"{draft.cache_flush_s:,.1f} s a step are lost to the allocator"
    return f"{reserves}: {lost}, which frees its cache and allocates it anew in every micro-batch"


def _owned(view: LayoutRows, at_peak: list[Peak]) -> list[dict[str, float]]:
    state = view.state
    lasting = zip(state.parameters.tolist(), state.master.tolist(), state.optimizer.tolist(), strict=True)
    temporary = np.asarray([peak.activations + peak.buffers for peak in at_peak])
    beside = runtime(view.job, view.row, temporary, np.asarray([peak.in_flight_bytes for peak in at_peak])).tolist()
    return [
        {
            "parameters": parameters,
            "master": master,
            "gradients": peak.gradients,
            "optimizer": optimizer,
            "activations": peak.activations,
            "buffers": peak.buffers,
            "runtime": runtime_bytes,
        }
        for (parameters, master, optimizer), peak, runtime_bytes in zip(lasting, at_peak, beside, strict=True)
    ]


def _memory(draft: DraftEstimate) -> list[StageMemory]:
    view = draft.view
    layers = stages.chunk_layers(view.job, view.layout.pp, view.layout.virtual_stages)
    result = []
    for rank, (peak, owned) in enumerate(zip(draft.at_peak, draft.owned, strict=True)):
        in_flight = peak.in_flight(layers)
        moment = peak.moment + (f", {in_flight:.3g} micro-batches in flight" if view.layout.pp > 1 else "")
        own = int(view.share.layers[rank])
        result.append(StageMemory(stage=rank, layers=own, in_flight=in_flight, memory=Memory(**owned), moment=moment))
    return result


def _time(view: LayoutRows, pipeline_s: float) -> tuple[Time, float]:
    """Step time by cause on the slowest rank, and the pipeline's idle share."""
    layout, machine = view.layout, view.machine
    by_rank = view.rank_passes
    totals = by_rank.total
    slowest = int(np.argmax(totals))
    gas = layout.gas
    busy = float(totals[slowest]) * gas
    send = bubble = host = 0.0
    if layout.pp > 1:
        host = 2 * machine.efficiency.action_overhead_s * layout.virtual_stages * gas
        busy += host
        idle = max(0.0, pipeline_s - busy)
        send = min(idle, _send_share(view, by_rank, slowest))
        bubble = idle - send
    after = view.after
    causes = {f"{name}_s": gas * each for name, each in view.causes(slowest).items()}
    causes["launch_s"] += host + float(after.launch_s[0])
    time = Time(
        **causes,
        send_s=send,
        bubble_s=bubble,
        data_s=float(after.data_s[0]),
        optimizer_s=float(after.optimizer_s[0]),
        offload_s=float(after.offload_s[0]),
        overhead_s=after.overhead_s,
    )
    mean_busy = float(np.mean(totals)) * gas + host
    in_pipeline = busy + bubble + send
    return time, max(0.0, 1 - mean_busy / in_pipeline) if layout.pp > 1 else 0.0


def _send_share(view: LayoutRows, by_rank: Passes, slowest: int) -> float:
    """How much of the pipeline's time the hops between stages cost: the closed form with them less that without."""
    layout = view.layout
    total, slow = [float(np.sum(part)) for part in by_rank.parts], [float(part[slowest]) for part in by_rank.parts]

    def closed_form(hop_s: float) -> float:
        return float(makespan(layout.schedule, layout.pp, layout.gas, layout.virtual_stages, total, slow, hop_s))

    return max(0.0, closed_form(view.hop_s) - closed_form(0.0))


def _activation_items(view: LayoutRows, peak: Peak) -> list[ActivationItem]:
    """What each module keeps on the peak stage, largest first; the last is alive for a moment only."""
    share = view.chunk_share
    kept: dict[str, float] = {}
    for kind, layers, _ in share.each():
        count = sum(waiting * float(layers[chunk]) for chunk, waiting in peak.chunks.items())
        if count:
            for module, each in activations.layer(view.job, view.row, kind).kept.items():
                kept[module] = kept.get(module, 0.0) + count * float(np.broadcast_to(each, 1)[0])
    rest = peak.activations - sum(kept.values())
    name = "logits and loss" if "loss" in peak.moment else "working set of the layer in backward"
    kept[name] = max(0.0, rest)
    ordered = sorted(kept.items(), key=lambda item: -item[1])
    return [ActivationItem(module=module, bytes=bytes_) for module, bytes_ in ordered if bytes_ > 0]


def _range_notes(view: LayoutRows) -> list[str]:
    """Shapes that the measured surface does not cover."""
    surface = view.machine.surface
    if surface is None:
        return []
    outside: dict[str, list[str]] = {}
    kinds = view.job.model.layer_kinds
    for matmul in (matmul for kind in kinds for matmul in layer_matmuls(view.job, view.row, kind)):
        shape = (float(np.max(axis)) for axis in (matmul.m, matmul.n, matmul.k))
        if (sentence := kernels.outside_range(surface, *shape)) and matmul.name not in outside.setdefault(sentence, []):
            outside[sentence].append(matmul.name)
    return [f"matmul {', '.join(names)}: {sentence}, extrapolated" for sentence, names in outside.items()]
