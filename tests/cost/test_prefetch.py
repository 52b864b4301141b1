"""What DeepSpeed's ZeRO-3 gathers in a micro-batch."""

from __future__ import annotations

from typing import Any

import pytest

from builders import make_job
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.prefetch import GatheredElements, gathered_elements
from ultrascale.specs.framework import Framework
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

LAYER, VOCABULARY = 4 * 4096 * 4096 + 3 * 4096 * 11008, 32000 * 4096


def found(layers: int, live_parameters: float = 1e9, **layout: Any) -> GatheredElements:
    model = Model.load("llama-2-7b").model_copy(update={"layers": layers})
    shape = Layout(dp=8, zero=3, **layout)
    framework = Framework.load("deepspeed").model_copy(update={"live_parameters": live_parameters})
    job = make_job(model, "8xh100", 4096, shape, framework=framework)
    return gathered_elements(job, LayoutColumns.of([shape]))


def test_what_is_used_again_within_1e9_elements_is_gathered_once() -> None:
    """Llama-2-7B with one layer, 0.46e9 elements; its 3 norms stay. With 2 layers 1.07e9 lie between uses of the embedding."""
    one, two = found(1), found(2)
    assert one.each_microbatch == LAYER + 2 * VOCABULARY
    assert one.each_step == 3 * 4096
    assert one.live_at_loss == one.each_microbatch + one.each_step
    assert two.each_microbatch == 2 * LAYER + 3 * VOCABULARY + 4096 * 4096  # and q of the first layer


def test_what_was_freed_before_the_prefetches_turned_is_gathered_again() -> None:
    """With 4 layers: prefetches of 5e7 elements a call reach the backward's parameters while the first layer's up is called.
    By then the embedding, q, k, v, o and the gate were freed, which was seen of DeepSpeed 0.19.8 too.
    """
    one = found(4)
    again = VOCABULARY + 4 * 4096 * 4096 + 4096 * 11008
    assert one.each_microbatch == 4 * LAYER + 2 * VOCABULARY + again
    assert found(4, recompute="full").each_microbatch == one.each_microbatch + 4096 * 11008


def test_few_live_parameters_stop_prefetches() -> None:
    """Of 16 layers the last half of 1e9 elements is kept for a backward that uses it within 1e9, else all up to 1e9."""
    few, many = found(16, live_parameters=1), found(16)
    assert few.live_at_loss == pytest.approx(0.5e9, rel=0.01)
    assert many.live_at_loss == pytest.approx(1e9, rel=0.05)
    assert few.each_microbatch - many.each_microbatch == pytest.approx(0.5e9, rel=0.05)


def test_layouts_share_what_tp_and_recomputation_decide() -> None:
    rows = LayoutColumns.of([Layout(dp=8, zero=3, mbs=mbs, tp=tp) for mbs in (1, 2) for tp in (1, 2)])
    job = make_job("llama-2-7b", "8xh100", 4096, Layout(dp=8, zero=3), framework=Framework.load("deepspeed"))
    each = gathered_elements(job, rows).each_microbatch
    assert each[0] == each[2] != each[1] == each[3]
    assert each[0] == pytest.approx(2 * job.model.parameters - 1e9, rel=0.01)
