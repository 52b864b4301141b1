"""An estimate's time by cause, its traffic and its money, against sums done by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from builders import make_job, with_constants
from ultrascale.cost.estimate import drafts, estimate
from ultrascale.cost.hardware import ClusterRates
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.efficiency import Efficiency
from ultrascale.specs.errors import SpecError
from ultrascale.specs.estimate import MEASURED_OWNERS, Estimate, Traffic
from ultrascale.specs.framework import Framework
from ultrascale.specs.gpu import GPU
from ultrascale.specs.layout import Layout

N8 = 8_030_261_248


def traffic(predicted: Estimate) -> dict[tuple[str, str], Traffic]:
    """By technique and collective: of several, the one that moves most."""
    return {(one.technique, one.collective): one for one in sorted(predicted.traffic, key=lambda one: one.bytes)}


def test_tensor_parallel_traffic() -> None:
    """Llama-3-70B, tp 8 with sequence parallelism, 80 layers, 4 micro-batches of 8192 tokens.

    Two regions a layer: each is entered by a gather and left by a scatter, forward and backward, and backward gathers the
    saved input once more. Slices leave the embedding and enter the head, which gathers its saved input again, too. Each moves
    7/8 of 2·8192·8192 bytes = 117.4 MB.
    """
    layout = Layout(tp=8, gas=4)
    moved = traffic(estimate(make_job("llama-3-70b", "8xh200", 8192, layout), layout))
    each = 7 / 8 * 2 * 8192 * 8192
    assert moved["tensor", "all_gather"].calls == 4 * (2 * 80 * 3 + 1 + 2)
    assert moved["tensor", "reduce_scatter"].calls == 4 * (2 * 80 * 2 + 1 + 1)
    assert moved["tensor", "all_gather"].bytes == pytest.approx(4 * (2 * 80 * 3 + 1 + 2) * each)
    without = layout.changed(sequence_parallel=False)
    reduced = traffic(estimate(make_job("llama-3-70b", "8xh200", 8192, without), without))["tensor", "all_reduce"]
    assert reduced.bytes == pytest.approx(4 * (2 * 80 * 2 + 2) * 2 * each)  # as much as a gather and a scatter each


def test_data_parallel_traffic_happens_once_a_step() -> None:
    """fp32 gradients of Llama-3-8B over 8: 2 · 7/8 · 4N = 56.2 GB, whatever the accumulation."""
    for gas in (1, 16):
        layout = Layout(dp=8, gas=gas)
        moved = traffic(estimate(make_job("llama-3-8b", "8xh200", 8192, layout), layout))
        assert moved["data", "all_reduce"].bytes == pytest.approx(2 * 7 / 8 * 4 * N8)
        assert moved["data", "all_reduce"].calls == 1


@pytest.mark.parametrize(
    ("zero", "keep", "gathers", "scatters"), [(1, False, 1, 1), (2, False, 1, 4), (3, False, 8, 4), (3, True, 4, 4)]
)
def test_zero_traffic(zero: int, keep: bool, gathers: int, scatters: int) -> None:
    """4 micro-batches: ZeRO-1 scatters fp32 gradients and gathers bf16 once; 2 scatters each time; 3 gathers twice."""
    layout = Layout(dp=8, zero=zero, keep_gathered=keep, gas=4)
    moved = traffic(estimate(make_job("llama-3-8b", "8xh200", 8192, layout), layout))
    assert moved["zero", "all_gather"].bytes == pytest.approx(gathers * 7 / 8 * 2 * N8)
    assert moved["zero", "reduce_scatter"].bytes == pytest.approx(scatters * 7 / 8 * 4 * N8)


def test_hsdp_reduces_its_replicas() -> None:
    """64 data ranks in shards of 8: gathers stay in the node, and 4N/8 bytes are reduced over the 8 replicas."""
    layout = Layout(dp=64, zero=3, zero_shards=8)
    moved = traffic(estimate(make_job("llama-3-8b", "64xh100", 8192, layout), layout))
    gather, reduce = moved["zero", "all_gather"], moved["zero", "all_reduce"]
    assert (gather.group, gather.per_domain) == (8, 8)
    assert (reduce.group, reduce.per_domain) == (8, 1)
    assert reduce.bytes == pytest.approx(2 * 7 / 8 * 4 * N8 / 8)


def test_pipeline_traffic() -> None:
    """Activations forward and gradients back, each 2·8192·8192 / 8 bytes with sequence parallelism, for 16 micro-batches."""
    layout = Layout(tp=8, pp=4, gas=16)
    moved = traffic(estimate(make_job("llama-3-70b", "32xh100", 8192, layout), layout))["pipeline", "send_recv"]
    assert moved.bytes == pytest.approx(2 * 16 * 2 * 8192 * 8192 / 8)
    assert moved.per_domain == 1


def test_expert_traffic() -> None:
    """Mixtral, ep 8: dispatch and combine, forward and backward, 32 layers; 2 experts a token, busiest rank 1.1 of the mean."""
    layout = Layout(dp=8, ep=8, gas=2, zero=1)
    moved = traffic(estimate(make_job("mixtral-8x7b", "8xh200", 4096, layout), layout))["expert", "all_to_all"]
    assert moved.bytes == pytest.approx(2 * 2 * 32 * 2 * 7 / 8 * 2 * 4096 * 2 * 1.1 * 4096)


@pytest.mark.parametrize(
    ("variant", "collective", "bytes_each"),
    [
        # 8192 tokens a rank: k and v 2·2·1024 B/token; q and output 2·2·4096
        ("zigzag", "send_recv", 7 * 3 * 8192 * 4096),  # 7 blocks forward, and twice their bytes backward
        ("ulysses", "all_to_all", 2 * 7 / 8 * 8192 * (4096 + 16384)),
    ],
)
def test_context_traffic(variant: str, collective: str, bytes_each: float) -> None:
    layout = Layout(cp=8, context_parallel=variant)
    moved = traffic(estimate(make_job("llama-3-8b", "8xh200", 65536, layout), layout))["context", collective]
    assert moved.bytes == pytest.approx(32 * bytes_each)


def test_attention_time() -> None:
    """Half of 2·s·a·(d + d) FLOPs forward and 2.5 times that backward, at the rates that were set, on rows of 8192.

    32 layers · 8192 tokens · 8192·32·256 = 1.759e13 FLOPs forward, at 989.4e12 · 0.5 · 8192/(8192 + half_row); 32 heads of 64
    blocks are 2048, beside which 132 multiprocessors stand idle for 1.4 each.
    """
    layout = Layout(dp=8, zero=3)
    of = make_job("llama-3-8b", with_constants(8, attention_forward=0.5, attention_backward=0.4), 8192, layout)
    reach = 8192 / (8192 + ClusterRates(of).attention.half_row) * 2048 / (2048 + 1.4 * 132)
    work = 32 * 8192 * 8192 * 32 * 256
    by_hand = work / (989.4e12 * 0.5 * reach) + 2.5 * work / (989.4e12 * 0.4 * reach)
    assert estimate(of, layout).time.attention_s == pytest.approx(by_hand, rel=1e-3)


def test_optimizer_time() -> None:
    """ZeRO-1 over 8: N/8 parameters, each with gradient (2·4 bytes), master (2·4), moments (2·8) and bf16 copy (2)."""
    layout = Layout(dp=8, zero=1)
    of = make_job("llama-3-8b", with_constants(8, memory_bandwidth=0.5), 8192, layout)
    bandwidth = 0.5 * of.cluster.gpu.memory_bandwidth_gb_s * 1e9
    assert estimate(of, layout).time.optimizer_s == pytest.approx(N8 / 8 * 34 / bandwidth, rel=1e-6)


def test_offload_time() -> None:
    """Gradients down (4 B) and parameters up (2 B) over the host link, and Adam on the node's CPUs at 4e9 a second."""
    layout = Layout(dp=8, zero=2, offload="optimizer")
    of = make_job("llama-3-8b", with_constants(8, host_link=0.5, host_adam_gparams_s=4.0), 8192, layout)
    link = 0.5 * of.cluster.gpu.pcie_bandwidth_gb_s * 1e9
    assert estimate(of, layout).time.offload_s == pytest.approx(N8 / 8 * 6 / link + N8 / 4e9, rel=1e-6)


def test_a_faster_matmul_changes_only_matmul_time() -> None:
    layout = Layout(dp=8, zero=1)
    slow = estimate(make_job("llama-3-8b", with_constants(8, matmul=0.5), 8192, layout), layout).time
    fast = estimate(make_job("llama-3-8b", with_constants(8, matmul=1.0), 8192, layout), layout).time
    assert slow.matmul_s == pytest.approx(2 * fast.matmul_s)
    assert slow.attention_s == fast.attention_s
    assert slow.memory_bound_s == fast.memory_bound_s


def test_matmul_time_is_between_peak_and_half_of_it() -> None:
    """6·(N − embedding) · 8192 FLOPs = 3.69e14 in 0.373 s at peak: training's shapes reach 60 to 95 % of it on an H100."""
    layout = Layout(dp=8, zero=1)
    time = estimate(make_job("llama-3-8b", "8xh100", 8192, layout), layout).time
    at_peak = 6 * (N8 - 525_336_576) * 8192 / 989.4e12
    assert 0.60 < at_peak / time.matmul_s < 0.95


def test_full_recomputation_repeats_the_forward() -> None:
    """A third of matmuls and attention's share of forward, less the head: between a quarter and 40 % of the work."""
    layout = Layout(dp=8, zero=1, recompute="full")
    time = estimate(make_job("llama-3-8b", "8xh100", 8192, layout), layout).time
    work = time.matmul_s + time.attention_s + time.memory_bound_s
    assert 0.25 < time.recompute_s / work < 0.40
    assert estimate(make_job("llama-3-8b", "8xh100", 8192, layout), layout.changed(recompute="none")).time.recompute_s == 0


def test_checkpointing_does_not_repeat_the_last_matmul() -> None:
    """torch.utils.checkpoint stops before a layer's last matmul, which selective recomputation repeats as little as others."""

    def again(schedule: str, recompute: str, stops: bool) -> float:
        layout = Layout(pp=2, gas=4, schedule=schedule, recompute=recompute)
        engine = Framework.load("ultrascale-eager").model_copy(update={"exact_memory_trace": stops})
        return estimate(make_job("llama-3-8b", "2xh100", 8192, layout, framework=engine), layout).time.recompute_s

    matmul = again("1f1b", "full", False) - again("1f1b", "full", True)
    assert matmul > 0
    assert again("zero-bubble", "full", False) - again("zero-bubble", "full", True) == pytest.approx(matmul)
    assert again("zero-bubble", "selective", True) == pytest.approx(again("1f1b", "selective", True))


def test_the_bubble_of_1f1b() -> None:
    """Equal stages and 32 micro-batches on 8 ranks: idle 7/39 of the time (Narayanan 2021), sends and head on top."""
    layout = Layout(tp=8, pp=8, gas=32)
    predicted = estimate(make_job("gpt3-175b", "64xa100-80gb", 2048, layout), layout)
    assert 7 / 39 < predicted.bubble_fraction < 7 / 39 + 0.02
    assert predicted.time.bubble_s > 0
    one_rank = Layout(dp=8, tp=8, gas=4)
    assert estimate(make_job("gpt3-175b", "64xa100-80gb", 2048, one_rank), one_rank).time.bubble_s == 0


def test_days_hours_and_money() -> None:
    """15e12 tokens: days = tokens / rate / 86400; 8 GPUs · 24 h; 2 $ an hour."""
    layout = Layout(dp=8, zero=1, gas=4)
    cluster = Cluster.from_mapping({"gpu": "h100", "gpus": 8, "price_per_gpu_hour_usd": 2.0})
    predicted = estimate(make_job("llama-3-8b", cluster, 8192, layout, total_tokens=15 * 10**12), layout)
    days = 15e12 / predicted.tokens_per_s / 86400
    assert predicted.train_days == pytest.approx(days)
    assert predicted.gpu_hours == pytest.approx(days * 24 * 8)
    assert predicted.cost_usd == pytest.approx(days * 24 * 8 * 2)
    assert predicted.cost_usd_per_billion_tokens == pytest.approx(predicted.cost_usd / 15_000)


def test_no_price_no_cost() -> None:
    layout = Layout(dp=8, zero=1)
    predicted = estimate(make_job("llama-3-8b", "8xh100", 8192, layout), layout)
    assert predicted.cost_usd is predicted.cost_usd_per_billion_tokens is predicted.train_days is None


def test_borrowed_hardware_is_named() -> None:
    """No guess is silent: a chip without a table says that half of its peak is assumed, and three quarters of its link."""
    layout = Layout(dp=8, zero=1, mbs=1, gas=1)
    bare = next(gpu for gpu in GPU.presets().values() if gpu.surface is None and "bf16" in gpu.peak_tflops)
    notes = " ".join(estimate(make_job("llama-3.2-1b", f"8x1 {bare.name}", 2048, layout), layout).notes)
    assert "no measured matmuls: 50%" in notes
    assert "no measured collectives: 75%" in notes
    known = " ".join(estimate(make_job("llama-3.2-1b", "8xh100", 2048, layout), layout).notes)
    assert "matmuls from" in known
    assert "assumed for every shape" not in known


def test_shapes_outside_the_table_are_named() -> None:
    layout = Layout(dp=8, zero=1)
    notes = estimate(make_job("smollm-135m", "8xh100", 128, layout), layout).notes
    assert any("extrapolated" in note for note in notes)


def test_an_illegal_layout_is_refused() -> None:
    with pytest.raises(SpecError, match=r"layout\.tp is 3"):
        estimate(make_job("llama-3-8b", "3x1 h100", 8192, Layout(tp=3)), Layout(tp=3))


def test_naive_hooks_and_buckets() -> None:
    """Nothing hidden, hidden with a latency per tensor, hidden: in this order."""
    layout = Layout(dp=64)
    waits = [
        estimate(make_job("llama-3-8b", "64xh200", 8192, layout), layout.changed(data_parallel=word)).time.data_s
        for word in ("bucketed", "hooks", "naive")
    ]
    assert waits[0] < waits[1] < waits[2]
    moved = traffic(estimate(make_job("llama-3-8b", "64xh200", 8192, layout), layout))["data", "all_reduce"]
    assert waits[2] == pytest.approx(moved.time_s)


def test_a_dense_model_has_no_expert_gathers() -> None:
    """ZeRO-3 on 512 ranks: one gather a layer and pass, not a second one of no bytes and 511 steps.

    Where latency rules (1 ms a step) a gather or scatter takes 511 ms, at 0.5 ms half of it; 32 layers, embedding and head
    gather twice, scatter once.
    """
    layout = Layout(dp=512, zero=3)
    moved = estimate(make_job("llama-3-8b", "512xh100", 8192, layout), layout).traffic
    assert {(one.technique, one.collective) for one in moved} == {("zero", "all_gather"), ("zero", "reduce_scatter")}
    of = make_job("llama-3-8b", with_constants(512, network_latency_s=1e-3, overlap=0.0, overlap_slowdown=0.0), 8192, layout)
    quick = make_job("llama-3-8b", with_constants(512, network_latency_s=5e-4, overlap=0.0, overlap_slowdown=0.0), 8192, layout)
    latency_s = estimate(of, layout).time.zero_s - estimate(quick, layout).time.zero_s
    assert latency_s == pytest.approx(34 * 3 * 511 * 5e-4, rel=1e-6)


def test_the_documentation_names_every_constant_and_its_default() -> None:
    """docs/time.md lists specs/efficiency.py."""
    text = (Path(__file__).parents[2] / "docs" / "time.md").read_text(encoding="utf-8")
    printed: dict[str, str] = {}
    for names, default in re.findall(r"^\| (`.*?`) \| ([^|]*) \|", text, flags=re.MULTILINE):
        printed.update(dict.fromkeys(re.findall(r"`(\w+)`", names), default))
    units = {" µs": 1e-6, " ms": 1e-3, "": 1.0, " (false)": 1.0}
    for name, field in Efficiency.model_fields.items():
        assert name in printed, name
        if field.default is not None:
            number, unit = re.match(r"([\d.]+)(.*)", printed[name]).groups()  # type: ignore[union-attr]
            assert float(number) * units[unit] == pytest.approx(float(field.default)), name


def test_a_cache_that_exceeds_the_gpu_is_freed_and_allocated_again_in_every_micro_batch() -> None:
    """Nanotron on tp 32: 32 layers gather 2 · 31 · 64 MiB each, 124 GiB in all, beside 20 to 80 GiB of tensors.

    A quarter of the micro-batch needs a quarter of both; in an engine that waits for its gathers nothing is held.
    """
    layouts = [Layout(tp=32, mbs=mbs, gas=256 // mbs) for mbs in (64, 16)]
    nanotron = make_job("llama-2-7b", "32xh100", 4096, layouts[0], framework=Framework.load("nanotron"))
    lost, none = (estimate(nanotron, layout) for layout in layouts)
    draft = drafts(nanotron, [layouts[0]])[0]
    tensors_gib = sum(draft.owned[0][owner] for owner in MEASURED_OWNERS) / 2**30
    assert draft.reserved_gib == pytest.approx(tensors_gib + 124, abs=4)  # the context, and 4 % of slack
    over_gib = draft.reserved_gib - lost.capacity_gib
    assert lost.time.overhead_s == pytest.approx(0.16 * over_gib * 4 + 0.005)
    assert f"reserves {draft.reserved_gib:,.0f} GiB" in lost.cache_flush
    assert (none.time.overhead_s, none.cache_flush) == (pytest.approx(0.005), "")
    waits = nanotron.model_copy(update={"framework": nanotron.framework.model_copy(update={"fragmentation": 0.0})})
    assert not estimate(waits, layouts[0]).cache_flush
