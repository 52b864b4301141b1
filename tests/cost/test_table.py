"""The closed forms of the search against the simulated estimate, and the legality and capacity of its cells."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from random_layouts import sample

from ultrascale.cost import stages
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.estimate import drafts, estimate
from ultrascale.cost.hardware import ClusterRates, Workload
from ultrascale.cost.legality import problem
from ultrascale.cost.step import component_totals
from ultrascale.cost.table import BLOCK, SearchTable
from ultrascale.plan.candidates import LayoutConstraints, cores
from ultrascale.schedules import REGISTRY
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.units import GIB


def heaviest_chunk(job: Job, layout: Layout) -> float:
    """The slowest pipeline chunk over the mean, in layers, the head counted as the layers it weighs."""
    counts = np.asarray(stages.chunk_layers(job, layout.pp, layout.virtual_stages), dtype=float)
    counts[-1] += stages.head_in_layers(job.model)
    return float(counts.max() / counts.mean())


def closed_forms(job: Job, layouts: Sequence[Layout]) -> list[tuple[float, float]]:
    """Step time and peak of each; a table has one number of pipeline ranks, and backwards that are split or not."""
    found: dict[int, tuple[float, float]] = {}
    tables = [(layout.pp, REGISTRY[layout.schedule].split_backward) for layout in layouts]
    for table in set(tables):
        numbers = [number for number, one in enumerate(tables) if one == table]
        mine = [layouts[number] for number in numbers]
        variants = tuple(dict.fromkeys((layout.schedule, layout.virtual_stages) for layout in mine))
        cells = SearchTable(job, LayoutColumns.of(mine), variants, ClusterRates(job)).evaluate(np.inf)
        for row, (number, layout) in enumerate(zip(numbers, mine, strict=True)):
            cell = row, variants.index((layout.schedule, layout.virtual_stages))
            assert cells.legal[cell]
            found[number] = float(cells.step_s[cell]), float(cells.peak_bytes[cell])
    return [found[number] for number in range(len(layouts))]


@cache
def errors() -> tuple[tuple[float, float, float, Layout], ...]:
    """(time, memory, heaviest chunk, layout) of random legal layouts: errors relative to the simulator, in percent."""
    found = []
    for job, layouts in sample(30, seed=7):
        for layout, exact, (step_s, peak_bytes) in zip(layouts, drafts(job, layouts), closed_forms(job, layouts), strict=True):
            time, memory = step_s / exact.step_time_s - 1, peak_bytes / (exact.peak_gib * GIB) - 1
            found.append((100 * time, 100 * memory, heaviest_chunk(job, layout), layout))
    return tuple(found)


def quantiles(values: list[float]) -> tuple[float, float]:
    median, p95 = np.quantile(np.abs(values), (0.5, 0.95))
    return float(median), float(p95)


@pytest.mark.slow
def test_time_and_memory_where_chunks_weigh_about_the_same() -> None:
    """The heaviest chunk up to 1.3 of the mean: six layouts of seven."""
    even = [error for error in errors() if error[2] <= 1.3]
    assert len(even) >= 250
    median, p95 = quantiles([time for time, *_ in even])
    assert median <= 1
    assert p95 <= 4
    median, p95 = quantiles([memory for _, memory, *_ in even])
    assert median <= 1
    assert p95 <= 4


def test_time_and_memory_of_all() -> None:
    """The closed forms of time know ranks, not chunks: where one chunk is far heavier, interleaved schedules and V-Min come out
    too fast.
    """
    for errors_of in zip(*((time, memory) for time, memory, *_ in errors()), strict=True):
        median, p95 = quantiles(list(errors_of))
        assert median <= 1
        assert p95 <= 6


def test_one_stage_per_rank_has_exact_memory() -> None:
    """in_flight is exact for equal chunks, and one chunk per rank is always equal to itself."""
    single = [memory for _, memory, _, layout in errors() if layout.virtual_stages == 1]
    assert len(single) >= 100
    assert max(map(abs, single)) < 1e-6


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_split_backward_of_our_engine_has_exact_memory(recompute: str, zero: int) -> None:
    """Fused blocks and plain ones: what deferred weight gradients keep is not there yet at the loss."""
    layout = Layout(pp=4, tp=2, dp=2, zero=zero, gas=8, recompute=recompute, schedule="zero-bubble")
    cluster, tokens = Cluster.load(f"{layout.gpus}xh100"), layout.batch_tokens(8192)
    job = Job(model=Model.load("llama-3-8b"), cluster=cluster, seq=8192, batch_tokens=tokens)
    assert closed_forms(job, [layout])[0][1] == pytest.approx(estimate(job, layout).peak_gib * GIB, rel=1e-8)


def test_no_pipeline_is_exact_and_afab_nearly() -> None:
    """AFAB waits for the slowest forward and then for the slowest backward, maybe on two ranks; the closed form knows one."""
    for name, bound in (("none", 1e-6), ("afab", 1.5)):
        found = [time for time, _, _, x in errors() if (x.pp == 1 if name == "none" else x.pp > 1 and x.schedule == name)]
        assert len(found) >= 25
        assert max(map(abs, found)) < bound


def test_the_peak_of_uneven_moe_pipelines_is_found() -> None:
    """61 layers of DeepSeek-V3 over 32 ranks: the peak is on rank 2, the first with two MoE layers, not beside the ends."""
    job = Job(
        model=Model.load("deepseek-v3"),
        cluster=Cluster.load("256xh100"),
        seq=4096,
        batch_tokens=4096 * 512,
        framework=Framework.load("playbook"),
    )
    layout = Layout(pp=32, dp=8, ep=8, gas=64, recompute="full")
    exact = estimate(job, layout)
    assert exact.peak_stage == 2
    assert closed_forms(job, [layout])[0][1] == pytest.approx(exact.peak_gib * GIB)


def small_job() -> Job:
    return Job(
        model=Model.load("llama-3.2-1b"),
        cluster=Cluster.load("8xa100-40gb"),
        seq=4096,
        batch_tokens=4096 * 16,
        framework=Framework.load("playbook"),
    )


def test_cells_that_do_not_fit_have_no_time() -> None:
    job = small_job()
    capacity = job.cluster.gpu.memory_gib * GIB
    counts = {"fits": 0, "over": 0, "illegal": 0}
    for group in cores(job, LayoutConstraints()):
        cells = SearchTable(job, group.columns, group.variants, ClusterRates(job)).evaluate(capacity)
        over = cells.peak_bytes > capacity
        assert np.array_equal(np.isfinite(cells.step_s), cells.legal & ~over)
        for name, mask in (("fits", cells.legal & ~over), ("over", cells.legal & over), ("illegal", ~cells.legal)):
            counts[name] += int(mask.sum())
    assert min(counts.values()) > 0


def test_the_table_agrees_with_legality_cell_by_cell() -> None:
    job = small_job()
    for group in cores(job, LayoutConstraints()):
        cells = SearchTable(job, group.columns, group.variants, ClusterRates(job)).evaluate(np.inf)
        for core in range(0, len(group.columns), 97):
            for variant in range(len(group.variants)):
                layout = cells.layouts(np.asarray([core]), np.asarray([variant])).layout(0)
                assert (layout.schedule, layout.virtual_stages) == group.variants[variant]
                assert cells.legal[core, variant] == (problem(job, layout) is None)


def test_block_size_does_not_change_results() -> None:
    """A table larger than a block has the numbers of its rows alone."""
    job = small_job()
    group = next(iter(cores(job, LayoutConstraints())))
    rows = np.resize(np.arange(len(group.columns)), BLOCK + 50)
    whole = SearchTable(job, group.columns.take(rows), group.variants, ClusterRates(job)).evaluate(np.inf)
    few = SearchTable(job, group.columns.take(rows[-50:]), group.variants, ClusterRates(job)).evaluate(np.inf)
    assert np.array_equal(whole.step_s[-50:], few.step_s)
    assert np.array_equal(whole.peak_bytes[-50:], few.peak_bytes)


def test_a_capacity_does_not_change_layouts_that_fit() -> None:
    """Cores are dropped share by share: what fits has the peak and the time it has where nothing is dropped."""
    job = Job(
        model=Model.load("llama-3-8b"),
        cluster=Cluster.load("64xh100"),
        seq=8192,
        batch_tokens=2**20,
        framework=Framework.load("playbook"),
    )
    capacity, some = 30 * GIB, 0
    for group in cores(job, LayoutConstraints()):
        all_of_them = SearchTable(job, group.columns, group.variants, ClusterRates(job)).evaluate(np.inf)
        cells = SearchTable(job, group.columns, group.variants, ClusterRates(job)).evaluate(capacity)
        fits = cells.legal & (all_of_them.peak_bytes <= capacity)
        assert np.array_equal(cells.legal, all_of_them.legal)
        assert np.array_equal(cells.fits, fits)
        assert np.array_equal(cells.peak_bytes[fits], all_of_them.peak_bytes[fits])
        assert np.array_equal(cells.step_s, np.where(fits, all_of_them.step_s, np.inf))
        over = cells.legal & ~fits
        assert np.all(cells.peak_bytes[over] > capacity)
        assert np.all(cells.peak_bytes[over] <= all_of_them.peak_bytes[over])
        some += int(fits.any() and over.any())
    assert some > 3


@pytest.mark.parametrize(("model", "cluster"), [("llama-3-8b", "64xh100"), ("mixtral-8x7b", "32xh100")])
def test_a_longest_step_drops_only_longer_ones(model: str, cluster: str) -> None:
    job = Job(
        model=Model.load(model),
        cluster=Cluster.load(cluster),
        seq=8192,
        batch_tokens=2**20,
        framework=Framework.load("playbook"),
    )
    capacity, dropped = job.cluster.gpu.memory_gib * GIB, 0
    for group in cores(job, LayoutConstraints.parse(["ep=8"] if job.model.moe else [])):
        all_of_them = SearchTable(job, group.columns, group.variants, ClusterRates(job)).evaluate(capacity)
        longest_s = float(np.quantile(all_of_them.step_s[all_of_them.fits], 0.2)) if all_of_them.fits.any() else 1.0
        layouts = SearchTable(job, group.columns, group.variants, ClusterRates(job))
        cells = layouts.evaluate(capacity, longest_s)
        timed = np.isfinite(cells.step_s)
        assert np.array_equal(cells.fits, timed)
        assert np.array_equal(cells.peak_bytes[timed], all_of_them.peak_bytes[timed])
        assert np.array_equal(cells.step_s[timed], all_of_them.step_s[timed])
        assert np.all(all_of_them.step_s[~timed] > longest_s)
        dropped += int((np.isfinite(all_of_them.step_s) & ~timed).sum())
    assert dropped > 1000


@pytest.mark.quick_cases(every=3)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("framework", ["ultrascale", "playbook", "megatron-core"])
@pytest.mark.parametrize(("model", "cluster"), [("llama-3-8b", "32xh100"), ("mixtral-8x7b", "32xh100")])
def test_lower_bounds_are_never_above_the_figures(model: str, cluster: str, framework: str, precision: str) -> None:
    job = Job(
        model=Model.load(model),
        cluster=Cluster.load(cluster),
        seq=8192,
        batch_tokens=2**20,
        framework=Framework.load(framework),
        precision=precision,
    )
    draw, tight = np.random.default_rng(0), list[float]()
    for group in cores(job, LayoutConstraints()):
        rows = draw.permutation(len(group.columns))[:200]
        layouts = SearchTable(job, group.columns, group.variants, ClusterRates(job))
        cells = layouts.evaluate(np.inf, rows=rows)
        assert np.all(layouts.step_lower_bound_s()[rows, None] <= cells.step_s)
        least = layouts.peak_lower_bound_bytes()[rows, None]
        assert np.all(np.where(cells.legal, least, 0.0) <= cells.peak_bytes)
        tight += np.ravel(least / cells.peak_bytes.min(axis=1, keepdims=True)).tolist()
    assert np.median(tight) > 0.5  # enough to exclude layouts


def test_rows_that_share_their_compute_take_as_long_as_each_by_itself() -> None:
    """Experts that tp cuts, or that ep spreads over tp ranks, differ in dp alone."""
    model = Model.load("qwen3-30b-a3b")
    job = Job(
        model=model,
        cluster=Cluster.load("16xh100"),
        seq=4096,
        batch_tokens=64 * 4096,
        framework=Framework.load("megatron-core"),
    )
    machine = ClusterRates(job)
    every = LayoutColumns.joined([table.columns for table in cores(job, LayoutConstraints())])
    rows = every.take(np.random.default_rng(0).permutation(len(every)))
    together = component_totals(Workload(job, rows, machine)).layers[-1]
    assert together is not None
    some = np.flatnonzero((rows.tp == 4) & (rows.cp == 1) & (rows.ep == 2) & (rows.pp > 1))[:40]
    assert len({*rows.expert_cut[some].tolist()}) == 2
    for row in some:
        alone = component_totals(Workload(job, rows.take(slice(row, row + 1)), machine)).layers[-1]
        assert alone is not None
        assert together.total[row] == alone.total[0]
