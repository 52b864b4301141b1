"""The playbook's cheat-sheet with one plan's numbers in every cell: printed and corrected forms side by side."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.cost import flops, stages
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.memory.states import compute_bytes, gradient_bytes, on_rank
from ultrascale.cost.network import CommGroup, mesh
from ultrascale.specs.estimate import Estimate
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import count, gib
from ultrascale.specs.weights import mean_multiplied_elements


@dataclass(frozen=True)
class Strategy:
    """One row of the cheat-sheet for this plan."""

    name: str
    degree: str
    batch: str
    memory: str
    compute: str
    communication: str
    overlap: OverlapRatio
    verdict: str

    @property
    def cells(self) -> tuple[str, ...]:
        """Under HEADINGS."""
        return self.name, self.degree, self.batch, self.memory, self.compute, self.communication, self.verdict


HEADINGS = ("technique", "degree", "batch", "memory", "compute", "communication", "overlap")


@dataclass(frozen=True)
class Formula:
    name: str
    form: str
    value: str


def bandwidth(machine: ClusterRates, group: CommGroup) -> float:
    """Bytes a second that one member sends: the cheat-sheet's peak_bw, for where the group really sits."""
    inside = machine.intra("all_gather").bytes_per_s
    if not group.leaves_domain[0]:
        return inside
    return float(min(inside, group.per_domain[0] * machine.inter.bytes_per_s))


def strategies(plan: Plan) -> list[Strategy]:
    job, x, model = plan.job, plan.layout, plan.job.model
    machine, row = ClusterRates(plan.job), LayoutColumns.of([plan.layout])
    places = mesh(row, machine.cluster)
    tokens = x.mbs * job.seq / x.cp
    peak = job.peak_flops
    stage_share = stages.share_of(job, row, np.zeros(1, dtype=np.int64))
    own = on_rank(model, row, stage_share)
    rank_parameters = float(own.total[0])
    # Of a MoE layer only the parameters that a token uses compute, while gradients of all that a rank holds travel.
    layer = mean_multiplied_elements(model)
    effective_tokens = tokens * model.active_parameters / _parameters_per_replica(model, x)

    def communication(technique: str, pattern: str) -> str:
        calls = [one for one in plan.estimate.traffic if one.technique == technique]
        moved, took, exposed_s = (sum(getattr(one, name) for one in calls) for name in ("bytes", "time_s", "exposed_s"))
        return f"{pattern}: {gib(moved)} in {took:.3g} s, {exposed_s:.3g} s exposed" if moved else f"{pattern}: none here"

    b, g = compute_bytes(job), gradient_bytes(job)
    data_bw, shard_bw = bandwidth(machine, places.data), bandwidth(machine, places.shard)
    master = 4 if job.precision != "fp32" else 0
    full = f"{gib(rank_parameters * b)} bf16 + {gib(rank_parameters * master)} fp32 parameters"
    gbs = f"gbs = {x.mbs}·{x.dp}·{x.gas}·{job.seq} = {count(x.batch_tokens(job.seq))} tokens"
    split_batch = f"1/dp of the batch: {x.mbs * x.gas} sequences a rank"
    zero = (
        (
            "DP + ZeRO-1",
            f"fp32 parameters and optimizer states / {x.shards} (of {full})",
            "step end: all-gather of parameters",
            data_ratio(x.shards, rank_parameters, effective_tokens, peak, shard_bw),
        ),
        (
            "DP + ZeRO-2",
            f"those and gradients ({gib(rank_parameters * g)}) / {x.shards}",
            "backward: reduce-scatter of gradients",
            zero_2_ratio(x.shards, rank_parameters, effective_tokens, peak, shard_bw),
        ),
        (
            "DP + ZeRO-3",
            f"those and bf16 parameters ({gib(rank_parameters * b)}) / {x.shards}",
            "per layer: all-gather forward and backward, reduce-scatter backward",
            zero_3_ratio(x.shards, effective_tokens, peak, shard_bw),
        ),
    )
    rows = [
        (
            "Data parallelism",
            f"dp={x.dp}",
            gbs,
            f"activations only, through mbs={x.mbs}",
            split_batch,
            communication("data", "backward: all-reduce of gradients"),
            data_ratio(x.data_ranks, rank_parameters, effective_tokens, peak, data_bw),
        ),
        *(
            (
                name,
                "in use" if level == x.zero else "not in use",
                gbs,
                memory,
                split_batch,
                communication("zero", pattern) if level == x.zero else f"{pattern}: none here",
                ratio,
            )
            for level, (name, memory, pattern, ratio) in enumerate(zero, start=1)
        ),
        (
            "Tensor parallelism",
            f"tp={x.tp}" + (" + SP" if x.sequence_parallel and x.tp > 1 else ""),
            "no effect",
            f"parameters, states and activations / {x.tp}",
            f"matmuls / {x.tp}",
            communication("tensor", "4 per layer and direction: all-gather, reduce-scatter of activations"),
            tensor_ratio(x.tp, model.hidden, layer, peak, bandwidth(machine, places.tensor)),
        ),
        (
            "Pipeline parallelism",
            f"pp={x.pp} {x.schedule}" + (f" v={x.virtual_stages}" if x.virtual_stages > 1 else ""),
            f"prefers large gas ({x.gas}) to shrink the bubble ({plan.estimate.bubble_fraction:.1%})",
            f"parameters and states / {x.pp}",
            f"layers / {x.pp}",
            communication("pipeline", "per micro-batch: send and receive activations and gradients"),
            pipeline_ratio(x.pp, model.hidden, model.layers, layer, peak, bandwidth(machine, places.pipeline)),
        ),
        (
            "Context parallelism",
            f"cp={x.cp} {x.context_parallel}" if x.cp > 1 else "cp=1",
            "prefers long sequences",
            f"activations / {x.cp}",
            f"sequence / {x.cp} = {job.seq // x.cp:,} tokens",
            communication("context", "per layer, cp−1 times: keys and values forward, and their gradients backward"),
            context_ratio(x.cp, job.seq, x.mbs, model.kv_dim, model.q_dim, peak, bandwidth(machine, places.context)),
        ),
    ]
    if model.moe is not None:
        rows.append(
            ("Expert parallelism", f"ep={x.ep}", "data parallel for the rest of the model",
             f"experts / {x.ep}", f"{model.moe.experts // x.ep} of {model.moe.experts} experts a rank",
             communication("expert", "per MoE layer: all-to-all, twice forward and twice backward"),
             expert_ratio(x.ep, model.moe.experts, model.hidden, model.expert_parameters, peak,
                          bandwidth(machine, places.expert)))
        )  # fmt: skip
    return [Strategy(*entries, _verdict(entries[-1])) for entries in rows]


def _parameters_per_replica(model: Model, layout: Layout) -> float:
    """Parameters over all stages and tp ranks of one data rank: with ep it holds a part of the experts only."""
    elsewhere = 1 - 1 / layout.ep
    experts = model.moe.experts if model.moe is not None else 0
    return model.parameters - elsewhere * model.moe_layers * experts * model.expert_parameters


def _verdict(ratio: OverlapRatio) -> str:
    if not ratio.corrected:
        return "not used"
    words = "could hide" if ratio.corrected <= 1 else "cannot hide whole"
    return f"{ratio.corrected:.3g}: {words}"


def formulas(plan: Plan) -> list[Formula]:
    """The cheat-sheet's useful formulas with this plan's numbers, beside the exact ones."""
    job, x, model = plan.job, plan.layout, plan.job.model
    approximate = flops.parameters_approximate(model.hidden, model.layers, model.vocab)
    printed = 2 * model.layers * 16 * model.hidden**2
    peak = plan.estimate.memory[plan.estimate.peak_stage].memory
    tokens = x.batch_tokens(job.seq)
    per_gpu = tokens / x.gpus
    active = model.active_parameters
    return [
        Formula("global batch", "mbs·dp·gas·seq", f"{x.mbs}·{x.dp}·{x.gas}·{job.seq} = {tokens:,} tokens"),
        Formula("parameters, approximate", "h·v + L·(12h² + 13h) + 2h", f"{approximate:,}"),
        Formula("parameters, exact", "every tensor counted", f"{model.parameters:,}"),
        Formula("model_bf16, printed", "2·L·16·h² (one shape only)", gib(printed)),
        Formula("model_bf16", "2·N", gib(2 * model.parameters)),
        Formula("model_bf16 on a GPU", "2·N over tp, pp (and dp with ZeRO-3)", gib(peak.parameters)),
        Formula("model_fp32 on a GPU", "2·model_bf16 / dp_if_zero1", gib(peak.master)),
        Formula("grads on a GPU", "2·model_bf16 / dp_if_zero2 (fp32)", gib(peak.gradients)),
        Formula("optimstates on a GPU", "4·model_bf16 / dp_if_zero1 (AdamW)", gib(peak.optimizer)),
        Formula("actives on a GPU", "by operator, see explain", gib(peak.activations)),
        Formula("peak memory", "sum of these, + buffers and runtime", f"{plan.estimate.peak_gib:,.2f} GiB"),
        Formula("compute, printed", "6·model_bf16·mbs·seq·gas (bytes for parameters)",
                f"{6 * 2 * model.parameters * x.mbs * job.seq * x.gas:.3g}"),
        Formula("compute, corrected", "6·N·tokens / GPUs", f"{flops.compute_approximate(active, per_gpu):.3g} FLOPs per GPU"),
        Formula("compute, exact", "matmuls + full attention",
                f"{flops.model_flops(model, job.seq) * per_gpu:.3g} FLOPs per GPU"),
        Formula("compute, causal", "matmuls + half attention",
                f"{flops.model_flops(model, job.seq, causal=True) * per_gpu:.3g} FLOPs per GPU"),
        *([] if job.cluster.efficiency.synchronous else _utilisation(plan.estimate)),
        Formula("bubble", "(p−1)/(v·m) of the work", f"{textbook_bubble(x.pp, x.gas, x.virtual_stages):.2%}"),
    ]  # fmt: skip


def _utilisation(found: Estimate) -> list[Formula]:
    return [
        Formula("MFU / HFU", "model / hardware FLOPs over peak", f"{found.mfu:.1%} / {found.hfu:.1%}"),
        Formula("MFU / HFU, causal", "the same, masked half not counted", f"{found.mfu_causal:.1%} / {found.hfu_causal:.1%}"),
    ]


# -------------------------------------------------------------------------------------------------------------- overlap ratios


@dataclass(frozen=True)
class OverlapRatio:
    """An overlap ratio of the cheat-sheet: transfer time over the computation that should hide it. Below 1 it can.

    `printed` is the cheat-sheet's own form, `corrected` the derived one; both are numbers for one layout.
    """

    technique: str
    printed_form: str
    printed: float
    corrected_form: str
    corrected: float
    correction: str
    """why the printed form is wrong"""


def data_ratio(dp: int, parameters: float, tokens: float, peak_flops: float, bandwidth: float) -> OverlapRatio:
    return OverlapRatio(
        "data",
        "(DP−1)·num_params·peak_flops / (2·peak_bw·num_tokens·DP)",
        (dp - 1) * parameters * peak_flops / (2 * bandwidth * tokens * dp),
        "(DP−1)/DP·peak_flops / (peak_bw·num_tokens)",
        (dp - 1) / dp * peak_flops / (bandwidth * tokens),
        "the printed form carries num_params, so it is no ratio; an all-reduce of 2N bytes moves 4N·(DP−1)/DP and meets "
        "the 4N·tokens FLOPs of backward",
    )


def zero_2_ratio(dp: int, parameters: float, tokens: float, peak_flops: float, bandwidth: float) -> OverlapRatio:
    return OverlapRatio(
        "zero-2",
        "(DP−1)·num_params·peak_flops / (4·peak_bw·num_tokens·DP)",
        (dp - 1) * parameters * peak_flops / (4 * bandwidth * tokens * dp),
        "(DP−1)/DP·peak_flops / (2·peak_bw·num_tokens)",
        (dp - 1) / dp * peak_flops / (2 * bandwidth * tokens),
        "the printed form carries num_params, so it is no ratio; a reduce-scatter of 2N bytes meets 4N·tokens FLOPs",
    )


def zero_3_ratio(dp: int, tokens: float, peak_flops: float, bandwidth: float) -> OverlapRatio:
    return OverlapRatio(
        "zero-3",
        "(DP−1)·peak_flops / (2·seq·mbs·peak_bw)",
        (dp - 1) * peak_flops / (2 * tokens * bandwidth),
        "(DP−1)/DP·peak_flops / (seq·mbs·peak_bw)",
        (dp - 1) / dp * peak_flops / (tokens * bandwidth),
        "the printed form counts one byte a parameter and DP−1 whole layers; an all-gather of 2P bytes moves (DP−1)/DP of "
        "them and meets the 2P·tokens FLOPs of the next layer's forward",
    )


def tensor_ratio(tp: int, hidden: int, layer_parameters: float, peak_flops: float, bandwidth: float) -> OverlapRatio:
    """One collective of s·mbs·h bf16 elements against the next region's share of the layer (half of it in the mean)."""
    return OverlapRatio(
        "tensor",
        "(TP−1)·peak_flops / (24·h·peak_bw)",
        (tp - 1) * peak_flops / (24 * hidden * bandwidth),
        "2·h·(TP−1)·peak_flops / (layer_parameters·peak_bw)",
        2 * hidden * (tp - 1) * peak_flops / (layer_parameters * bandwidth),
        "the printed form counts one byte an element and a whole layer of 12h² parameters for each of its four collectives",
    )


def context_ratio(cp: int, seq: int, mbs: int, kv_dim: int, q_dim: int, peak_flops: float, bandwidth: float) -> OverlapRatio:
    """One ring step: 2·2·(s/CP)·kv_dim bytes against 4·(s/CP)²·q_dim FLOPs, of which the causal mask leaves half."""
    return OverlapRatio(
        "context",
        "(CP−1)·B·L/CP·H_kv·(num_k + num_v)  [elements, not a ratio]",
        (cp - 1) * mbs * seq / cp * kv_dim * 2,
        "2·CP·kv_dim·peak_flops / (seq·q_dim·peak_bw)",
        2 * cp * kv_dim * peak_flops / (seq * q_dim * bandwidth) if cp > 1 else 0.0,
        "the printed entry is the volume of a layer's communication; the ratio is that of one ring step, causal mask counted",
    )


def expert_ratio(
    ep: int, experts: int, hidden: int, expert_parameters: float, peak_flops: float, bandwidth: float
) -> OverlapRatio:
    """Dispatch and combine of a routed token (2·2·h bytes, (EP−1)/EP of them leave) against its expert's 2·parameters FLOPs."""
    return OverlapRatio(
        "expert",
        "(EP−1)·peak_flops / (12·num_experts·h·peak_bw)",
        (ep - 1) * peak_flops / (12 * experts * hidden * bandwidth),
        "(EP−1)/EP·2·h·peak_flops / (expert_parameters·peak_bw)",
        (ep - 1) / ep * 2 * hidden * peak_flops / (expert_parameters * bandwidth),
        "the printed form counts one byte and one move an element, and lets every expert of a rank (6h² parameters each) see "
        "every token; a routed token moves twice and meets one expert",
    )


def pipeline_ratio(
    pp: int, hidden: int, layers: int, layer_parameters: float, peak_flops: float, bandwidth: float
) -> OverlapRatio:
    """One hop of 2·s·mbs·h bytes against the stage's 2·parameters FLOPs per token."""
    return OverlapRatio(
        "pipeline",
        "PP·peak_flops / (32·h·num_layers·peak_bw)",
        pp * peak_flops / (32 * hidden * layers * bandwidth),
        "PP·h·peak_flops / (num_layers·layer_parameters·peak_bw)",
        pp * hidden * peak_flops / (layers * layer_parameters * bandwidth) if pp > 1 else 0.0,
        "the printed form counts one byte an element and 16h² parameters a layer, which holds for one shape only",
    )


def textbook_bubble(pp: int, microbatches: int, virtual_stages: int = 1) -> float:
    """Playbook: idle over busy time, (p−1)/(v·m); AFAB and 1F1B share it with v = 1."""
    return (pp - 1) / (virtual_stages * microbatches)
