"""What a rank without peers receives: numbers, also where torch's `fake` group leaves memory as it was."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel.harness import SEQ, engine_of, job_of, training_of
from ultrascale.launch import local
from ultrascale.measure.peer_values import values_of_peers
from ultrascale.measure.rehearse_world import single_rank_world, without_values
from ultrascale.specs.layout import Layout


def finite_weights(layout: Layout, with_values: bool) -> bool:
    """After two steps of a rank alone, in a process where memory is NaN before something is written."""

    def rank(_: int, __: int, ___: str) -> bool:
        torch.use_deterministic_algorithms(True)
        values = values_of_peers() if with_values else nullcontext()
        with single_rank_world(0, layout.gpus), values:
            engine = engine_of(job_of("llama", batch_tokens=layout.batch_tokens(SEQ)), layout, training_of())
            without_values(engine)
            for number in range(2):
                engine.step(number)
            return all(bool(weight.local.isfinite().all()) for weight in engine.weights)

    (found,) = local.run(rank, 1, timeout_s=90)
    return bool(found)


@pytest.mark.parametrize(
    "fields",
    [{"pp": 2, "gas": 2}, {"cp": 2}, {"cp": 2, "context_parallel": "ulysses"}, {"tp": 2}, {"dp": 2, "zero": 3}],
    ids=str,
)
def test_a_rank_alone_computes_numbers(fields: dict[str, Any]) -> None:
    assert finite_weights(Layout(**fields), with_values=True)


def test_received_memory_is_left_as_it_was_without_them() -> None:
    assert not finite_weights(Layout(pp=2, gas=2), with_values=False)


def test_rows_are_exchanged_as_if_all_ranks_sent_alike() -> None:
    def rank(_: int, __: int, ___: str) -> list[list[float]]:
        torch.use_deterministic_algorithms(True)
        with single_rank_world(1, 4):
            with values_of_peers():
                counts, fewer, more = torch.empty(4, dtype=torch.int64), torch.empty(2), torch.empty(6)
                dist.all_to_all_single(counts, torch.tensor([3, 1, 2, 0]))
                dist.all_to_all_single(fewer, torch.arange(4.0), [1, 1, 0, 0], [1, 1, 1, 1])
                dist.all_to_all_single(more, torch.arange(4.0), [3, 1, 1, 1], [1, 1, 1, 1])
            after = torch.full((4,), -1.0)
            works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, after, 0)])
            for work in works:
                work.wait()
        return [one.tolist() for one in (counts, fewer, more, after)]

    ((counts, fewer, more, after),) = local.run(rank, 1, timeout_s=90)
    assert counts == [3, 1, 2, 0]
    assert fewer == [0.0, 1.0]
    assert more[:4] == [0.0, 1.0, 2.0, 3.0]
    assert all(0 < abs(value) < 1 for value in more[4:])
    assert after == [-1.0] * 4  # torch's own operators again
