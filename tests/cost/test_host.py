"""Time where operators run one by one in the host's own time: worked examples, and what GPUs must not notice of it."""

from __future__ import annotations

import numpy as np
import pytest

from builders import make_job, with_constants
from ultrascale.cost import host, kernels, operators
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.estimate import estimate
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.network import Op, mesh
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.efficiency import Efficiency
from ultrascale.specs.framework import Framework
from ultrascale.specs.gpu import GPU
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

PEAK, BANDWIDTH = 1e11, 1e10
ON_HOST = Efficiency(
    matmul=2.0,
    attention_forward=0.8,
    attention_backward=0.5,
    memory_bandwidth=1.0,
    kernel_launch_s=4e-6,
    synchronous=True,
    softmax_gscores_s=0.5,
    link_latency_s=1e-3,
    link_bandwidth=1.0,
)


def host_job(model: Model, layout: Layout, seq: int, constants: Efficiency = ON_HOST) -> Job:
    gpu = GPU.load("cpu").model_copy(
        update={"architecture": "x86_64", "peak_tflops": {"fp32": PEAK / 1e12}, "memory_bandwidth_gb_s": BANDWIDTH / 1e9}
    )
    cluster = Cluster.of(gpu, nodes=1, gpus_per_node=layout.gpus).model_copy(update={"efficiency": constants})
    return make_job(model, cluster, seq, layout, precision="fp32")


def attended(model: str, seq: int, constants: Efficiency = ON_HOST) -> tuple[float, float]:
    job = host_job(Model.load(model), Layout(), seq, constants)
    passes = kernels.mixer_passes(job, LayoutColumns.of([Layout()]), ClusterRates(job), LayerKind())
    return float(passes.forward[0]), float(passes.input_grad[0])


def test_attention_score_time_is_softmax_plus_matmuls() -> None:
    # tiny: 8 heads of 8. 256 tokens see blocks of 512 keys, so all 256. Softmax at 0.5·10⁹ scores a second; two matmuls of 2·8
    # FLOPs at 0.8 of 10¹¹. Backward 2.6 times the softmax, and five matmuls at half of the peak.
    scores = 8 * 256 * 256
    forward, backward = attended("tiny", 256)
    assert forward == pytest.approx(scores * (1 / 0.5e9 + 4 * 8 / 0.8e11))
    assert backward == pytest.approx(scores * (2.6 / 0.5e9 + 10 * 8 / 0.5e11))
    # mini: 8 heads of 32.
    forward, backward = attended("mini", 512)
    assert forward == pytest.approx(4 * scores * (1 / 0.5e9 + 4 * 32 / 0.8e11))
    assert backward == pytest.approx(4 * scores * (2.6 / 0.5e9 + 10 * 32 / 0.5e11))


def test_the_causal_mask_skips_only_whole_key_blocks() -> None:
    short, long = (attended("tiny", seq)[0] / seq**2 for seq in (1024, 2048))
    # Of 2,048 keys a token sees 1,024 in the mean and computes with half a block more: 1,280; of 1,024 it computes with 768.
    assert long / short == pytest.approx((1280 / 2048) / (768 / 1024))


def test_short_sequences_use_small_query_blocks() -> None:
    by_32, by_64, by_256 = (attended("tiny", seq)[0] / seq**2 for seq in (128, 512, 768))
    assert by_32 / by_64 == pytest.approx(1.4)
    assert by_256 / by_64 == pytest.approx(0.9 * (384 + 256) / 768)


@pytest.mark.parametrize(
    ("recompute", "forward", "backward"), [("none", 230, 300), ("full", 390, 465), ("selective", 1080, 1425)]
)
def test_operators_add_up(recompute: str, forward: int, backward: int) -> None:
    layout = Layout(recompute=recompute)
    job = host_job(Model.load("tiny"), layout, 128)
    launched = operators.layer(job, LayoutColumns.of([layout]), ClusterRates(job), LayerKind()).launch
    assert float(launched.forward[0]) == pytest.approx(4e-6 * forward)
    assert float(launched.input_grad[0]) == pytest.approx(4e-6 * backward)


def test_ends_and_optimizer_have_operators_too() -> None:
    one, two = (
        estimate(host_job(Model.load("tiny"), layout, 128), layout).time for layout in (Layout(mbs=1), Layout(mbs=1, gas=2))
    )
    # 8 layers of 230 + 300, the embedding's 40 + 20 and the head's 70 + 70, in every micro-batch.
    assert one.launch_s == pytest.approx(4e-6 * (8 * 530 + 200))
    assert two.launch_s == pytest.approx(2 * one.launch_s)
    # Seven matmuls and two norms a layer, ten operators each; beside them AdamW's passes, which are bytes.
    job = host_job(Model.load("tiny"), Layout(), 128, ON_HOST.model_copy(update={"kernel_launch_s": 0.0}))
    assert one.optimizer_s - estimate(job, Layout()).time.optimizer_s == pytest.approx(4e-6 * 10 * 9 * 8)


def test_matmuls_read_and_write_their_operands() -> None:
    job = host_job(Model.load("mini"), Layout(), 128)
    m, n, k = (np.asarray([size]) for size in (128.0, 768.0, 256.0))
    expected = 2 * 128 * 768 * 256 / PEAK + 4 * (128 * 256 + 256 * 768 + 128 * 768) / BANDWIDTH
    assert float(ClusterRates(job).matmul_s(m, n, k)[0]) == pytest.approx(expected)


def test_elementwise_passes_by_hand() -> None:
    layout = Layout(mbs=2)
    job = host_job(Model.load("mini"), layout, 64)
    passes = host.cpu_elementwise(job, LayoutColumns.of([layout]), ClusterRates(job), LayerKind())
    # mini: hidden and queries 256 wide, keys 128, gates 768. Forward 2·7 + 6 of hidden, 10 + 2 of queries and keys, 5 of gates.
    assert float(passes.forward[0]) == pytest.approx(128 * 4 * (20 * 256 + 12 * 384 + 5 * 768) / BANDWIDTH)
    assert float(passes.input_grad[0]) == pytest.approx(128 * 4 * (53 * 256 + 14 * 384 + 11 * 768) / BANDWIDTH)


def test_gloo_reduce_scatter_is_an_all_reduce() -> None:
    layout = Layout(tp=2)
    columns = LayoutColumns.of([layout])

    def seconds(op: Op, constants: Efficiency) -> float:
        job = host_job(Model.load("tiny"), layout, 128, constants)
        machine = ClusterRates(job)
        return float(machine.collective_s(op, np.asarray([2.0**20]), mesh(columns, machine.cluster).tensor)[0])

    elsewhere = ON_HOST.model_copy(update={"synchronous": False})
    assert seconds("reduce_scatter", ON_HOST) == seconds("all_reduce", ON_HOST)
    assert seconds("reduce_scatter", elsewhere) < seconds("all_reduce", elsewhere)


def test_gpu_estimates_ignore_host_constants() -> None:
    layout = Layout(dp=8)
    other = {"softmax_gscores_s": 1e-3}
    jobs = [
        Job(
            model=Model.load("llama-3-8b"),
            cluster=cluster,
            seq=4096,
            batch_tokens=8 * 4096,
            framework=Framework.load("playbook"),
        )
        for cluster in (
            Cluster.load("8xh100"),
            Cluster.load("8xh100").model_copy(update={"efficiency": Efficiency(**other)}),
        )
    ]
    columns = LayoutColumns.of([layout])
    totals = [operators.layer(one, columns, ClusterRates(one), LayerKind()).total.total for one in jobs]
    assert totals[0] == totals[1]
    for end in (operators.head, operators.embedding):
        assert not end(jobs[0], columns, ClusterRates(jobs[0])).launch.total.any()


def test_launches_go_on_while_collectives_run() -> None:
    """An eager dense layer on tp 8 with one short sequence waits for the larger of launching, and of computing and sending."""
    layout = Layout(tp=8, mbs=1)
    eager = Framework.load("nanotron")
    job = Job(model=Model.load("llama-3.2-1b"), cluster=Cluster.load("8xh100"), seq=512, batch_tokens=512, framework=eager)
    rows = LayoutColumns.of([layout])
    host_s = 3 * float(host.layer_launch_s(job, rows, ClusterRates(job), LayerKind())[0])
    time = estimate(job, layout).time
    layers = job.model.layers
    assert time.tensor_s > 0
    busy_s = time.matmul_s + time.attention_s + time.memory_bound_s + time.tensor_s
    assert time.launch_s < layers * host_s
    assert time.launch_s + busy_s == pytest.approx(layers * host_s, rel=0.2)  # the rest is that of embedding and head


def test_collective_calls_of_groups_over_nodes() -> None:
    """Four in a layer's forward: 4 · 16 · 25 µs = 1.6 ms on tp 16 of two nodes; none inside a node, unless it is said."""
    job = make_job("llama-3-8b", "16xh100", 8192, Layout(tp=16))
    machine, rows = ClusterRates(job), LayoutColumns.of([Layout(tp=16), Layout(tp=8, dp=2)])
    assert host.collective_calls_s(rows, machine) == pytest.approx([1.6e-3, 0.0])
    rack = make_job("llama-3-8b", "16xgb200", 8192, Layout(tp=16))
    assert not host.collective_calls_s(rows, ClusterRates(rack)).any()
    degraded = make_job("llama-3-8b", with_constants(16, link_call_s=2e-4), 8192, Layout(tp=8, dp=2))
    assert host.collective_calls_s(rows, ClusterRates(degraded))[1] == pytest.approx(4 * 8 * 2e-4)
    one_node = make_job("llama-3-8b", with_constants(8, link_call_s=2e-4), 8192, Layout(tp=8))
    assert not host.collective_calls_s(LayoutColumns.of([Layout(tp=8)]), ClusterRates(one_node)).any()
