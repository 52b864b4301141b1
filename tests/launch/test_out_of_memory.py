"""Out-of-memory reports: the plan's owners, the allocated memory, and advice that fits when it is followed."""

from __future__ import annotations

import re

import pytest
import torch

from ultrascale.cost.estimate import estimate
from ultrascale.launch.cpu_rates import CPURates, LinkRate
from ultrascale.launch.machine import cpu_cluster
from ultrascale.launch.out_of_memory import MemoryAtFailure, current_memory, is_out_of_memory, out_of_memory
from ultrascale.parallel.mesh import RankCoordinates
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan
from ultrascale.specs.training import Training
from ultrascale.specs.units import GIB
from ultrascale.train.request import Overrides, Request, from_plan

CUDA = (
    "CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 79.10 GiB of which 307.19 MiB is free. "
    "Of the allocated memory 70.00 GiB is allocated by PyTorch, and 6.00 GiB is reserved by PyTorch but unallocated."
)
MEMORY = MemoryAtFailure(total=79.1 * GIB, free=0.3 * GIB, allocated=70 * GIB, reserved=77 * GIB)


def request(model: str, cluster: str, layout: Layout, seq: int = 8192) -> Request:
    where = Cluster.load(cluster)
    job = Job(model=Model.load(model), cluster=where, seq=seq, batch_tokens=layout.batch_tokens(seq))
    return Request(job, layout, Training())


def advised(text: str) -> list[str]:
    return re.findall(r"^  (layout\.\S+(?: layout\.\S+)*)   \(", text, re.MULTILINE)


@pytest.mark.parametrize(
    "requested",
    [
        request("llama-3-8b", "8xh100", Layout(dp=8, mbs=4, gas=4)),
        request("llama-3-8b", "8xh100", Layout(dp=8, zero=1, mbs=8, gas=2)),
        request("llama-3-8b", "4xa100", Layout(dp=2, tp=2, zero=2, mbs=8, gas=2, recompute="selective")),
        request("llama-3-70b", "64xh100", Layout(dp=8, tp=8, mbs=4, gas=4, zero=1)),
        request("llama-3-70b", "64xh100", Layout(dp=16, tp=4, mbs=1, gas=8)),
    ],
    ids=lambda one: f"{one.job.model.name} {one.layout}",
)
def test_advice_fits_when_it_is_followed(requested: Request) -> None:
    before = estimate(requested.job, requested.layout)
    assert not before.fits
    text = out_of_memory(requested, 3, CUDA, MEMORY, RankCoordinates.of(requested.layout, 0))
    offered = advised(text)
    assert 1 <= len(offered) <= 3
    plan = Plan(job=requested.job, layout=requested.layout, estimate=before)
    for words in offered:
        advised_request = from_plan(plan, Overrides.parse(words.split()), requested.layout.gpus)
        after = estimate(advised_request.job, advised_request.layout)
        assert after.fits, words
        assert after.peak_gib < 0.9 * before.peak_gib
        assert advised_request.layout.gpus == requested.layout.gpus
        assert advised_request.job.batch_tokens == requested.job.batch_tokens


def test_the_report_names_rank_step_owners_and_allocated_memory() -> None:
    requested = request("llama-3-8b", "16xh100", Layout(dp=2, tp=4, pp=2, gas=8, mbs=8))
    text = out_of_memory(requested, 3, CUDA, MEMORY, RankCoordinates(pp=1, dp=0, cp=0, tp=2))
    assert text.startswith("rank 10 (pp 1, dp 0, tp 2) ran out of memory at step 3: 1.96 GiB more were asked for.")
    assert "70.00 GiB in tensors at the most, 77.00 GiB taken by the allocator, 307.2 MiB free of 79.10 GiB" in text
    stage = estimate(requested.job, requested.layout).memory[1]
    assert f"stage 1 with {stage.layers} layers peaks at {stage.memory.total / GIB:,.2f} GiB" in text
    for owner in ("parameters", "gradients", "optimizer", "activations"):
        assert f"{owner} {getattr(stage.memory, owner) / GIB:,.2f} GiB" in text


def test_one_change_is_enough_where_it_is() -> None:
    """Smaller changes come first, though cutting otherwise (three fields: an axis, dp, gas) may be faster."""
    requested = request("llama-3-70b", "64xh100", Layout(dp=8, tp=8, mbs=1, gas=16, zero=1))
    offered = advised(out_of_memory(requested, 1, CUDA, MEMORY, RankCoordinates(0, 0, 0, 0)))
    assert [len(words.split()) for words in offered] == [1, 1, 1]
    assert "layout.recompute=selective" in offered


def test_advice_lowers_the_peak_where_the_plan_was_predicted_to_fit() -> None:
    requested = request("llama-3-8b", "8xh100", Layout(dp=8, zero=3, mbs=1, gas=4))
    before = estimate(requested.job, requested.layout)
    assert before.fits
    text = out_of_memory(requested, 1, CUDA, MEMORY, RankCoordinates(0, 0, 0, 0))
    assert "That should have fitted" in text
    plan = Plan(job=requested.job, layout=requested.layout, estimate=before)
    for words in advised(text):
        advised_request = from_plan(plan, Overrides.parse(words.split()), 8)
        assert estimate(advised_request.job, advised_request.layout).peak_gib <= 0.9 * before.peak_gib


def test_where_nothing_fits_the_missing_memory_is_reported() -> None:
    requested = request("llama-3-70b", "1xh100", Layout())
    text = out_of_memory(requested, 1, CUDA, MemoryAtFailure(total=10 * GIB), RankCoordinates(0, 0, 0, 0))
    assert not advised(text)
    missing = float(re.search(r"([\d,.]+) GiB too much", text)[1].replace(",", ""))  # type: ignore[index]
    smallest = float(re.search(r"needs ([\d,.]+) GiB", text)[1].replace(",", ""))  # type: ignore[index]
    assert missing == pytest.approx(smallest - 10, abs=0.02)


def test_processes_of_a_cpu_share_its_memory() -> None:
    place = cpu_cluster(2, CPURates(1e10, 1e10, 5e-6, 5e9, 5e9, 5e8), LinkRate(1e9, 1e-4), 2.0**36)
    layout = Layout(dp=2, mbs=8, gas=1)
    job = Job(model=Model.load("mini"), cluster=place, seq=256, batch_tokens=layout.batch_tokens(256), precision="fp32")
    requested = Request(job, layout, Training())
    before = estimate(job, layout)
    error = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4194304 bytes. Error code 12"
    text = out_of_memory(
        requested, 2, error, MemoryAtFailure(total=before.peak_gib * GIB, resident=0.2 * GIB), RankCoordinates(0, 1, 0, 0)
    )
    assert "rank 1 (" in text
    assert "4.0 MiB more were asked for" in text
    assert "offload" not in text
    plan = Plan(job=job, layout=layout, estimate=before)
    assert advised(text)
    for words in advised(text):  # two processes, so each may have half
        advised_request = from_plan(plan, Overrides.parse(words.split()), 2)
        assert estimate(advised_request.job, advised_request.layout).peak_gib <= before.peak_gib / 2


def test_a_smaller_micro_batch_is_accumulated_to_the_same_batch() -> None:
    """One process that recomputes everything has nothing else to give."""
    place = cpu_cluster(1, CPURates(1e10, 1e10, 5e-6, 5e9, 5e9, 5e8), LinkRate(1e9, 1e-4), 2.0**36)
    layout = Layout(mbs=8, gas=2, recompute="full")
    job = Job(model=Model.load("mini"), cluster=place, seq=256, batch_tokens=layout.batch_tokens(256), precision="fp32")
    text = out_of_memory(Request(job, layout, Training()), 1, "", MemoryAtFailure(total=2.0**36), RankCoordinates(0, 0, 0, 0))
    assert advised(text) == ["layout.mbs=4 layout.gas=4", "layout.mbs=2 layout.gas=8", "layout.mbs=1 layout.gas=16"]


def test_which_errors_are_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError(CUDA))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_memory_of_this_process() -> None:
    memory = current_memory(torch.device("cpu"))
    assert memory.resident is not None
    assert 1e7 < memory.resident < memory.total
    assert "resident in this process, of " in str(memory)
