"""What is advised when a request cannot be fulfilled as it is."""

from __future__ import annotations

import pytest

from builders import make_job
from ultrascale.cost.estimate import estimate
from ultrascale.cost.legality import problem
from ultrascale.plan import advice
from ultrascale.plan.candidates import LayoutConstraints, rank
from ultrascale.plan.search import plan
from ultrascale.specs.layout import Layout


@pytest.mark.parametrize(
    ("sequences", "fixed", "nearest"),
    [
        (64, {}, 64),
        (60, {}, 60),  # dp = 4, tp or pp = 2: 60 sequences can be cut
        (60, {"dp": 8}, 64),  # 56 and 64 are as near; 7.5 rounds to the even 8
        (3, {"dp": 8}, 8),
        (13, {"dp": 2, "mbs": 2}, 12),
        (100, {"mbs": 8, "dp": 8}, 128),
        (31, {"gas": 4, "dp": 8}, 32),
    ],
)
def test_the_nearest_batch(sequences: int, fixed: dict[str, int], nearest: int) -> None:
    found, notes = advice.reachable_batch(make_job("llama-3-8b", "8xh100", 8192, sequences), LayoutConstraints(fixed=fixed))
    assert found.sequences == nearest
    assert bool(notes) == (nearest != sequences)


def test_a_batch_is_rounded_to_the_nearest_sequence() -> None:
    of = make_job("llama-3-8b", "8xh100", 8192, 64)
    for tokens, sequences in ((8192 * 64 + 4000, 64), (8192 * 64 + 5000, 65)):
        found, notes = advice.reachable_batch(of.changed(batch_tokens=tokens), LayoutConstraints())
        assert found.batch_tokens == 8192 * sequences
        assert f"{sequences:,} sequences" in notes[0]


def test_a_batch_that_keeps_data_parallelism_small_is_named() -> None:
    """66 sequences on 64 GPUs divide over 2; with the 64 nearby any dp is possible."""
    notes = advice.batch_notes(make_job("llama-3-8b", "64xh100", 8192, 66), Layout(dp=2, tp=8, pp=4, gas=33))
    assert len(notes) == 1
    assert "at most dp = 2" in notes[0]
    assert "64 sequences (524,288 tokens, -3.0%) dp = 64 is possible" in notes[0]
    assert advice.batch_notes(make_job("llama-3-8b", "64xh100", 8192, 64), Layout(dp=64)) == []


def test_smaller_clusters_are_halves() -> None:
    sizes = [one.cluster.gpus for one in advice.smaller_clusters(make_job("llama-3-8b", "64xh100", 8192, 64))]
    assert sizes == [64, 32, 16, 8, 4, 2, 1]
    odd = [one.cluster.gpus for one in advice.smaller_clusters(make_job("llama-3-8b", "24xh100", 8192, 64))]
    assert odd == [24]  # 12 GPUs are no whole nodes


def test_the_fastest_fits_and_is_legal() -> None:
    of = make_job("llama-3-8b", "8xh100", 8192, 16)
    layout = rank(of, LayoutConstraints(), "throughput", 1).rows.layout(0)
    assert problem(of, layout) is None
    predicted, best = estimate(of, layout), plan(of, explain=False).plans[0].estimate
    assert predicted.fits
    assert predicted.step_time_s == pytest.approx(best.step_time_s, rel=0.02)


def test_no_layout_is_fastest_when_nothing_fits() -> None:
    assert rank(make_job("llama-3-70b", "4xa100-40gb", 4096, 8), LayoutConstraints(), "throughput", 1).score == []


@pytest.fixture(scope="module")
def no_fit() -> advice.NoFit:
    found = plan(make_job("llama-3-70b", "8xh100", 8192, 64)).no_fit
    assert found is not None
    return found


def test_every_change_fits(no_fit: advice.NoFit) -> None:
    assert no_fit.changes
    for change in no_fit.changes:
        assert problem(change.job, change.layout) is None
        assert change.estimate.fits
        assert f"{change.estimate.peak_gib:,.1f} GiB" in change.text


def test_the_change_to_more_gpus_is_the_fewest(no_fit: advice.NoFit) -> None:
    """70B with states of 1,183 GiB: 16 GPUs of 79 GiB are 1,266 and leave too little; doubling ends where something fits."""
    change = next(one for one in no_fit.changes if one.text.startswith("use ") and "of the same kind" in one.text)
    gpus = change.job.cluster.gpus
    assert gpus in (16, 32)
    if gpus > 16:
        assert plan(make_job("llama-3-70b", f"{gpus // 2}xh100", 8192, 64), explain=False).no_fit is not None


def test_a_larger_gpu_keeps_their_number(no_fit: advice.NoFit) -> None:
    for change in no_fit.changes:
        if "GPUs with" in change.text:
            assert change.job.cluster.gpus == 8
            assert change.job.cluster.gpu.memory_gib > 80


def test_advice_respects_constraints() -> None:
    found = plan(make_job("llama-3-70b", "8xh100", 8192, 64), fix=["recompute=none"]).no_fit
    assert found is not None
    assert found.layout.recompute == "none"
    assert all(change.layout.recompute == "none" for change in found.changes)
