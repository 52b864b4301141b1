"""Layers with experts as Megatron-Core runs them: what stays for backward, what is moved, what is computed again."""

from __future__ import annotations

import numpy as np
import pytest

from builders import make_job
from ultrascale.cost import communication, host, operators, stages
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.hardware import ClusterRates, Workload
from ultrascale.cost.memory import activations
from ultrascale.cost.memory.estimate import peak_parts
from ultrascale.cost.step import component_times
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

SEQ = 4096
MEGATRON = Framework.load("megatron-core")
QWEN_LAYER = LayerKind(mlp="moe", norms_heads=True)


def megatron_job(name: str = "qwen3-30b-a3b", **fields: object) -> Job:
    return make_job(name, "16xh100", SEQ, framework=MEGATRON.model_copy(update=fields))


def layer(of: Job, **layout: object) -> operators.LayerTime:
    return operators.layer(of, LayoutColumns.of([Layout(**layout)]), ClusterRates(of), QWEN_LAYER)


def test_a_layer_keeps_what_transformer_engine_saves() -> None:
    """Qwen3-30B, one rank, bytes per token: two norms' inputs and outputs 4·2·2048; q 2·4096 and k 2·512 before
    their norms and after, v 2·512; attention's output 2·4096 and log-sum-exp 4·32; the router's 17·128; of 8 routed copies the
    input 2·2048, gate and up 2·2·768 and the activation 2·768; no output, since routing weighs the activation.
    """
    per_token = 16384 + 2 * (8192 + 1024) + 1024 + 8192 + 128 + 17 * 128 + 8 * (4096 + 3072 + 1536)
    kept = activations.layer(megatron_job(), LayoutColumns.of([Layout()]), QWEN_LAYER)
    assert kept.total[0] == SEQ * per_token
    without = {"transformer_engine": False, "sliced_routing": "never"}
    plain = activations.layer(megatron_job(**without), LayoutColumns.of([Layout()]), QWEN_LAYER)
    assert plain.total[0] == SEQ * (per_token - (8192 + 1024) - 13 * 128 + 8 * 4096)


@pytest.mark.parametrize(("ep", "rows"), [(2, 8 * SEQ), (4, 8 * SEQ / 2)])
def test_experts_that_tp_cuts_keep_the_rows_of_all_its_ranks(ep: int, rows: float) -> None:
    """Two tp and two data ranks: over four of them experts are whole, and have the rows of slices."""
    job = megatron_job()
    columns = LayoutColumns.of([Layout(dp=2, tp=2, ep=ep)])
    kept = activations.layer(job, columns, QWEN_LAYER).modules["expert input"][0]
    assert kept == pytest.approx(2 * 2048 * rows * columns.busiest(job.cluster.efficiency.expert_imbalance)[0])


def test_micro_batch_overlap_keeps_a_second_layer_live() -> None:
    row = LayoutColumns.of([Layout(dp=16, ep=16)])
    alone, beside = (
        peak_parts(of, row, stages.share_of(of, row, np.zeros(1, dtype=np.int64)))
        for of in (megatron_job(), megatron_job(expert_overlap="microbatches"))
    )
    assert beside.layer.buffers[0] - alone.layer.buffers[0] == pytest.approx(
        activations.layer(megatron_job(), row, QWEN_LAYER).whole[0]
    )


@pytest.mark.parametrize(
    ("dispatcher", "ep", "passes"),
    [
        ("alltoall", 8, 4),  # to the ranks, by expert; and both back
        ("alltoall", 1, 2),
        ("alltoall", 128, 2),  # one expert a rank: what comes is all its own
        ("deepep", 8, 2),
        ("hybridep", 8, 2),
        ("allgather", 8, 2),
    ],
)
def test_tokens_sorted_by_rank_are_permuted_again_in_both_passes(dispatcher: str, ep: int, passes: int) -> None:
    of = megatron_job()
    columns = LayoutColumns.of([Layout(dp=max(ep, 16), ep=ep).changed(dispatcher=dispatcher)])
    routed = 8 * columns.busiest(of.cluster.efficiency.expert_imbalance)[0]
    moved = operators.permuted_bytes(of, columns, QWEN_LAYER)[0]
    assert moved == pytest.approx(passes * 2 * routed * 2 * SEQ * 2048)  # read and written, two bytes each
    assert operators.permuted_bytes(of, columns, LayerKind())[0] == 0


def test_selective_recomputation_repeats_no_dispatch() -> None:
    of, layout = megatron_job(), Layout(dp=16, ep=16, recompute="selective")
    machine = ClusterRates(of)
    row = LayoutColumns.of([layout])
    moe = component_times(Workload(of, row, machine)).layers[-1]
    assert moe is not None
    again = machine.stream_s(operators.memory_bound_bytes(of, row, QWEN_LAYER)) * of.framework.elementwise
    again = again + host.layer_starts_s(of, row).forward
    assert moe.recompute.input_grad == pytest.approx(again)
    assert again[0] < operators.layer(of, row, machine, QWEN_LAYER).memory_bound.forward[0]


def test_latent_recomputation_frees_qkv_and_repeats_two_matmuls() -> None:
    row = LayoutColumns.of([Layout(dp=8, ep=8, recompute="selective")])
    cheap, latents = megatron_job("deepseek-v3", selective="cheap"), megatron_job("deepseek-v3")
    one, other = (activations.layer(of, row, QWEN_LAYER) for of in (cheap, latents))
    smaller = {name for name in one.kept if one.kept[name][0] < other.kept[name][0]}
    assert smaller == {"qkv input", "mlp input", "expert activation"}
    assert other.kept["q, k, v"][0] == 0
    machine = ClusterRates(latents)
    piece = component_times(Workload(latents, row, machine)).layers[-1]
    assert piece is not None
    up = [one for one in operators.layer(latents, row, machine, QWEN_LAYER).matmuls if one.name in ("q up", "kv up")]
    assert len(up) == 2
    assert piece.recompute.input_grad == pytest.approx(operators.matmul_passes(machine, up).forward)


@pytest.mark.parametrize(
    ("model", "selective", "dropped"),
    [
        ("qwen3-30b-a3b", "modules", {"mlp input", "expert activation"}),
        ("qwen3-30b-a3b", "attention", set()),
        ("llama-3-8b", "modules", set()),
        ("llama-3-8b", "cheap", {"qkv input", "mlp input", "mlp activation"}),
    ],
)
def test_modules_that_selective_recomputation_repeats(model: str, selective: str, dropped: set[str]) -> None:
    of = megatron_job(model, selective=selective)
    row, kind = LayoutColumns.of([Layout(dp=16, recompute="selective")]), of.model.kind(0)
    saved = activations.layer(of, row, kind)
    assert {name for name in saved.kept if saved.kept[name][0] < saved.modules[name][0]} == dropped
    times = component_times(Workload(of, row, ClusterRates(of)))
    (component,) = times.layers
    compute = operators.layer(of, row, ClusterRates(of), kind)
    repeated = compute.memory_bound.forward - compute.never_repeated if dropped else compute.attention.forward
    assert component.recompute.input_grad == pytest.approx(repeated)


def test_expert_biases_are_separate_memory_bound_operators() -> None:
    """gpt-oss: 28 bytes of each routed output forward, 40 backward, at the bandwidth of memory-bound operators."""
    of = megatron_job("gpt-oss-120b")
    separate, inside = (layer(one, dp=16, ep=8) for one in (of, megatron_job("gpt-oss-120b", transformer_engine=False)))
    stream = ClusterRates(of).stream_bytes_s
    elements = SEQ * 4 * 1.1 * 2880
    assert separate.memory_bound.forward - inside.memory_bound.forward == pytest.approx(28 * elements / stream)
    assert separate.memory_bound.input_grad - inside.memory_bound.input_grad == pytest.approx(40 * elements / stream)
    without, with_ = (layer(megatron_job(transformer_engine=flag), dp=16, ep=8).total.total for flag in (False, True))
    assert without == with_


def test_an_all_gather_brings_every_token_to_every_expert_rank() -> None:
    of = megatron_job()
    layout = Layout(dp=16, ep=16, dispatcher="allgather")
    gather, scatter = communication.gathered_tokens(Workload(of, LayoutColumns.of([layout]), ClusterRates(of)))
    tokens = 16 * SEQ * of.model.hidden * 2
    assert (gather.collective, scatter.collective) == ("all_gather", "reduce_scatter")
    assert gather.wire_bytes[0] == scatter.wire_bytes[0] == pytest.approx(tokens * 15 / 16)


def test_node_limited_routing_reaches_fewer_nodes() -> None:
    """DeepSeek-V3 on 8 nodes: of 8 groups of experts a token chooses from 4."""
    model = Model.load("deepseek-v3")
    assert model.moe is not None
    free = model.model_copy(update={"moe": model.moe.model_copy(update={"groups": 1, "top_groups": 1})})
    layout = Layout(dp=64, ep=64, zero=1, dispatcher="deepep")

    def exposed_s(of: Model) -> float:
        job = make_job(of, "64xh100", SEQ, layout, framework="megatron-core")
        return float(communication.expert_traffic(Workload(job, LayoutColumns.of([layout]), ClusterRates(job))).forward_s[0])

    assert exposed_s(model) < 0.9 * exposed_s(free)


def test_deepep_and_hybridep_hide_no_shared_expert_in_megatron() -> None:
    layout = Layout(dp=16, ep=16, zero=1)
    job = make_job("deepseek-v2-lite", "16xh100", SEQ, layout, framework="megatron-core")

    def exposed_s(job: Job, dispatcher: str) -> float:
        columns = LayoutColumns.of([layout.changed(dispatcher=dispatcher)])
        return float(communication.expert_traffic(Workload(job, columns, ClusterRates(job))).forward_s[0])

    alone = job.changed(framework=job.framework.model_copy(update={"shared_expert_overlap": False}))
    assert exposed_s(job, "alltoall") < exposed_s(alone, "alltoall")
    assert exposed_s(job, "deepep") == exposed_s(alone, "deepep")
