"""Estimates of several layouts in one call: each equals the estimate of the layout alone."""

from __future__ import annotations

import pytest
from random_layouts import JOBS, job_of, layouts_of

from ultrascale.cost.estimate import drafts, estimate, full_estimate


@pytest.mark.parametrize("index", range(len(JOBS)))
def test_batched_estimates_equal_single_ones(index: int) -> None:
    job, layouts = job_of(index), layouts_of(index, 8, seed=index)
    assert len({layout.pp for layout in layouts}) > 1
    for layout, draft in zip(layouts, drafts(job, layouts), strict=True):
        alone = estimate(job, layout)
        assert draft.step_time_s == pytest.approx(alone.step_time_s, rel=1e-12)
        assert draft.peak_gib == pytest.approx(alone.peak_gib, rel=1e-12)
        assert (draft.fits, draft.peak_stage) == (alone.fits, alone.peak_stage)
        found = full_estimate(draft)
        assert found.time.model_dump() == pytest.approx(alone.time.model_dump(), rel=1e-9, abs=1e-12)
        for here, there in zip(found.memory, alone.memory, strict=True):
            assert here.memory.model_dump() == pytest.approx(there.memory.model_dump(), rel=1e-12)
            assert here.moment == there.moment
        assert found.traffic == alone.traffic
