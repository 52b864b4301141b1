"""Walking tensors over events: three tensors whose live bytes can be added up by eye."""

from __future__ import annotations

import numpy as np

from ultrascale.cost.memory.chunk import MemoryPoint, activation, buffer, fullest, walk

FORWARD, LOSS, BACKWARD, END = range(4)
TWO = np.asarray([10.0, 20.0])
TENSORS = (
    activation("saved", TWO, FORWARD, BACKWARD, freed_if_split=END),
    activation("logits", 3 * TWO, LOSS, BACKWARD),
    buffer("weight gradient", np.asarray([50.0, 1.0]), BACKWARD, END),
)


def test_a_tensor_is_live_from_its_allocation_until_it_is_freed() -> None:
    live = walk(TENSORS, END, rows=2)
    assert [live.at(event).activations.tolist() for event in range(END)] == [[10, 20], [40, 80], [0, 0]]
    assert [live.at(event).buffers.tolist() for event in range(END)] == [[0, 0], [0, 0], [50, 1]]


def test_the_peak_is_at_another_event_in_every_row() -> None:
    peak = walk(TENSORS, END, rows=2).peak()
    assert (peak.activations.tolist(), peak.buffers.tolist(), peak.total.tolist()) == ([0, 80], [50, 0], [50, 80])


def test_an_event_that_does_not_happen_is_no_peak() -> None:
    live = walk(TENSORS, END, rows=2).peaks_of_segments((FORWARD, END), {BACKWARD: np.asarray([False, True])})
    assert live.peak().total.tolist() == [40, 80]


def test_each_part_has_its_fullest_event_and_none_where_nothing_happens() -> None:
    parts = walk(TENSORS, END, rows=2).peaks_of_segments((FORWARD, BACKWARD, END), {BACKWARD: np.asarray([False, True])})
    assert [parts.at(part).total.tolist() for part in range(2)] == [[40, 80], [-np.inf, 1]]


def test_a_split_backward_keeps_what_weight_gradients_need() -> None:
    live = walk(TENSORS, END, rows=2, split=np.asarray([True, False]))
    assert live.at(BACKWARD).activations.tolist() == [10, 0]
    freed_early = activation("gathered input", TWO, FORWARD, END, freed_if_split=LOSS)
    live = walk([freed_early], END, rows=2, split=np.asarray([True, False]))
    assert [live.at(event).activations.tolist() for event in range(END)] == [[10, 20], [0, 20], [0, 20]]


def test_the_peak_event_is_selected_per_row() -> None:
    nothing, live = MemoryPoint.nothing(2), walk(TENSORS, END, rows=2)
    found = fullest(nothing, live.at(LOSS), live.at(BACKWARD))
    assert (found.activations.tolist(), found.buffers.tolist()) == ([0, 80], [50, 0])
