"""Where the GPU waits for the host, by hand: one queue through a step of our engine, launches as they were counted on it."""

from __future__ import annotations

import numpy as np
import pytest

from builders import make_job
from ultrascale import Cluster, Job, Layout, estimate
from ultrascale.cost import host
from ultrascale.cost.columns import LayoutColumns, Passes, RankShare
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.table import SearchTable
from ultrascale.cost.timeline import simulated
from ultrascale.specs.efficiency import Efficiency
from ultrascale.specs.framework import Framework

QUEUE = host.constants().launch_queue
EACH_S = 5e-4  # slow enough that a host sets any step of one micro-batch here
OVERHEAD_S = Efficiency().step_overhead_s


def job_of(
    name: str = "llama-3.2-1b", gas: int = 1, framework: str = "ultrascale", graphs: bool = False, **constants: float
) -> Job:
    given = Efficiency(**{"kernel_launch_s": EACH_S, **constants})
    cluster = Cluster.of(Cluster.load("1xh200").gpu, nodes=1, gpus_per_node=1, efficiency=given)
    engine = Framework.load(framework).model_copy(update={"cuda_graphs": graphs, "launch": 1.0})
    return make_job(name, cluster, 4096, gas, engine)


def launches(job: Job, layout: Layout) -> float:
    """So many launches' worth of host time is the step."""
    return (estimate(job, layout).step_time_s - OVERHEAD_S) / EACH_S


def starts(job: Job, layout: Layout) -> tuple[float, float]:
    """Of kernels that stream, in the passes of a step and in its optimizer."""
    share = RankShare.whole(job.model, 1)
    forward, backward, optimizer = host.kernel_starts_s(job, LayoutColumns.of([layout]), share)
    return float(layout.gas * (forward + backward)[0]), float(optimizer[0])


def test_a_host_bound_step_takes_the_launch_time() -> None:
    """16 layers of 14 + 29 launches, 40 for both ends, and for each of nine weights a layer half a launch for step and norm."""
    assert launches(job_of(), Layout()) == pytest.approx(16 * 43 + 40 + 16 * 9 * 0.5 * 2)
    assert launches(job_of(), Layout(recompute="full")) == pytest.approx(16 * (43 + 11) + 40 + 16 * 9)


def test_accumulated_gradients_are_launches_too() -> None:
    """Two micro-batches, each with half a launch for every weight that it is added to."""
    assert launches(job_of(gas=2), Layout(gas=2)) == pytest.approx(2 * (16 * 43 + 40 + 16 * 9 * 0.5) + 16 * 9)


def test_biases_are_weights_with_two_sums_in_backward() -> None:
    """Qwen2.5-0.5B: 24 layers, each with biases of query, key and value."""
    assert launches(job_of("qwen2.5-0.5b"), Layout()) == pytest.approx(24 * (43 + 2 * 3) + 40 + 24 * (9 + 3))


def test_a_gpu_bound_step_hides_launch_overhead() -> None:
    fast, slower = (job_of(kernel_launch_s=1e-6, step_overhead_s=overhead) for overhead in (0.0, 0.005))
    layout = Layout(mbs=4)
    found = estimate(slower.changed(batch_tokens=4 * 4096), layout)
    assert found.time.launch_s == starts(slower, layout)[0]  # AdamW's 9 ms hide the host
    assert found.time.overhead_s == 0
    assert found.step_time_s == estimate(fast.changed(batch_tokens=4 * 4096), layout).step_time_s


def test_the_optimizer_starts_with_an_empty_launch_queue() -> None:
    """The norm was read: a launch for each weight and the host's own work come before anything else can run."""
    job = job_of(kernel_launch_s=1e-4).changed(batch_tokens=8 * 4096)
    time = estimate(job, Layout(mbs=8)).time
    waits = time.launch_s - starts(job, Layout(mbs=8))[0]
    assert waits == pytest.approx(1e-4 * 0.5 * 16 * 9 + OVERHEAD_S - time.optimizer_s)


def test_memory_bound_kernels_have_a_startup_time() -> None:
    """Fused layers have 4 + 11 of them, and 4 in a forward once more; two for each of nine weights."""
    each = QUEUE.start_s * 16
    assert starts(job_of(), Layout()) == pytest.approx((each * 15, each * 2 * 9))
    assert starts(job_of(), Layout(recompute="full")) == pytest.approx((each * 19, each * 2 * 9))
    assert starts(job_of(), Layout(gas=3)) == pytest.approx((each * 3 * (15 + 9), each * 2 * 9))  # sums of micro-batches


def test_a_cuda_graph_step_waits_for_one_launch() -> None:
    job, layout = job_of(graphs=True), Layout()
    time = estimate(job, layout).time
    assert time.launch_s == pytest.approx(QUEUE.between_graphs_s + starts(job, layout)[0])
    free = estimate(job_of(kernel_launch_s=0.0, step_overhead_s=0.0), layout).time
    assert time.total == pytest.approx(free.total + QUEUE.between_graphs_s)


@pytest.mark.parametrize(
    ("job", "layout"),
    [
        (job_of(graphs=True, gas=4, kernel_launch_s=2e-5), Layout(mbs=4)),  # the GPU is waited for longer than it is launched
        (job_of(graphs=True).changed(precision="fp16"), Layout()),
        (job_of(graphs=True), Layout(offload="optimizer")),
        (job_of(graphs=True).changed(cluster=Cluster.load("8xh100"), batch_tokens=8 * 4096), Layout(dp=8)),
    ],
    ids=["the GPU sets it", "fp16", "offload", "eight GPUs"],
)
def test_steps_without_a_cuda_graph_are_unchanged(job: Job, layout: Layout) -> None:
    plain = job.changed(framework=job.framework.model_copy(update={"cuda_graphs": False}))
    assert estimate(job, layout).time == estimate(plain, layout).time


def idle(forward_s: float, backward_s: float, head_s: float, gas: int = 1) -> float:
    """Of a GPU that needs so long for layers which take the host 16 · (14 + 29) ms, with 40 ms for both ends."""
    job, zero = job_of(kernel_launch_s=1e-3, step_overhead_s=0.0), np.zeros(1)
    columns, share = LayoutColumns.of([Layout(gas=gas)]), RankShare.whole(job.model, 1)
    layers = Passes(np.asarray([forward_s]), np.asarray([backward_s]), zero)
    head = Passes(np.asarray([head_s]), zero, zero)
    weights = host.weights_launch_s(job.model, ClusterRates(job), share.layers)  # 72 ms
    return float(host.idle_s(job, columns, ClusterRates(job), share, layers, head, weights, zero)[0])


def test_a_long_head_hides_backward_launches_and_not_forward_ones() -> None:
    assert idle(0.2, 0.4, 0.0) == pytest.approx(0.688 + 0.04 + 0.072 - 0.6)
    assert idle(0.2, 0.4, 0.1) == pytest.approx(0.1)
    assert idle(0.2, 0.4, 0.5) == pytest.approx(0.02 + 0.224 - 0.2)  # forward comes first: nothing has been gained yet


def test_micro_batches_share_the_launch_queue() -> None:
    """Forward waits once where the host is faster on the whole, and every time where it is slower."""
    assert idle(0.2, 0.4, 0.5, gas=4) == pytest.approx(0.044)
    assert idle(0.2, 0.4, 0.0, gas=4) == pytest.approx(4 * (0.688 + 0.04 + 0.072 - 0.6) + 0.072)


@pytest.mark.parametrize("each_s", [1e-6, 4e-5, 5e-4])
def test_search_and_estimate_agree(each_s: float) -> None:
    job = job_of(gas=2, kernel_launch_s=each_s)
    layouts = [Layout(gas=2), Layout(gas=2, recompute="full")]
    cells = SearchTable(job, LayoutColumns.of(layouts), (("1f1b", 1),), ClusterRates(job)).evaluate(2.0**40)
    for layout, step_s in zip(layouts, cells.step_s[:, 0], strict=True):
        assert step_s == pytest.approx(estimate(job, layout).step_time_s, rel=1e-9)


def test_the_simulated_step_has_the_same_launch_overhead() -> None:
    job = job_of(gas=2)
    time = estimate(job, Layout(gas=2)).time
    assert simulated(job, Layout(gas=2)).makespan_s == pytest.approx(time.total - time.optimizer_s)


@pytest.mark.parametrize(
    ("job", "layout"),
    [
        (job_of("qwen3-30b-a3b"), Layout()),  # routing reads counts back
        (job_of().changed(cluster=Cluster.load("8xh100"), batch_tokens=8 * 4096), Layout(dp=4, pp=2, gas=2)),
        (job_of(framework="torchtitan"), Layout()),
    ],
    ids=["experts", "pipeline", "another engine"],
)
def test_synchronization_makes_each_layer_host_bound(job: Job, layout: Layout) -> None:
    assert not host.one_queue(job, LayoutColumns.of([layout]), ClusterRates(job))
    assert estimate(job, layout).time.overhead_s == OVERHEAD_S


def test_synchronization_makes_the_optimizer_host_bound() -> None:
    """AdamW launches a kernel for each of nine weights in 48 layers of experts: half a launch each."""
    job = job_of("qwen3-30b-a3b", kernel_launch_s=1e-3)
    weights = float(host.weights_launch_s(job.model, ClusterRates(job), np.asarray([48]))[0])
    assert weights == pytest.approx(1e-3 * 0.5 * 48 * (9 + 2))  # and two norms of queries and keys
    assert estimate(job, Layout()).time.optimizer_s == pytest.approx(weights)
