"""Our lists are torch's: every compute action of every rank, in order. Needs torch, not several processes."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest import mock

import pytest

from ultrascale.schedules import Schedule, build, legal

pytestmark = pytest.mark.slow  # `make test-slow` installs torch; the base never does
pipelining: Any = None
stage_module: Any = None


@pytest.fixture(scope="module", autouse=True)
def _torch() -> None:
    global pipelining, stage_module
    pipelining = import_module("torch.distributed.pipelining.schedules")
    stage_module = import_module("torch.distributed.pipelining.stage")


Listed = list[tuple[str, int, int, bool]]

MULTI = {
    "interleaved": ("ScheduleInterleaved1F1B", (2, 3, 4)),
    "zero-bubble": ("ScheduleInterleavedZeroBubble", (1, 2, 3, 4)),
    "zb-v": ("ScheduleZBVZeroBubble", (2,)),
    "dualpipe-v": ("ScheduleDualPipeV", (2,)),
}
GRID = [(ranks, m) for ranks in (1, 2, 3, 4, 6, 8) for m in range(1, 4 * ranks + 1)]


def mock_stage(ranks: int, rank: int, stages: int) -> Any:
    stage = mock.create_autospec(stage_module.PipelineStage, instance=True)
    stage.group_rank, stage.stage_index, stage.group_size = rank, rank, ranks
    stage.num_stages, stage.submod = stages, None
    return stage


def ours(schedule: Schedule) -> list[Listed]:
    return [[(str(kind), stage, k, paired) for kind, stage, k, paired in actions] for actions in schedule.actions]


def multi(class_name: str, ranks: int, microbatches: int, virtual_stages: int) -> list[Listed]:
    """From the order that a torch schedule of several stages per rank has worked out."""
    stages = [mock_stage(ranks, 0, ranks * virtual_stages)] * virtual_stages
    order = getattr(pipelining, class_name)(stages, microbatches).pipeline_order
    lists: list[Listed] = []
    for rank in range(ranks):
        listed: Listed = []
        for action in filter(None, order[rank]):
            parts = action.sub_actions or (action,)
            for at, part in enumerate(parts):
                overlapped = at + 1 < len(parts)
                listed.append((part.computation_type.value, part.stage_index, part.microbatch_index, overlapped))
        lists.append(listed)
    return lists


def single(class_name: str, ranks: int, rank: int, microbatches: int) -> Listed:
    """From what a torch schedule of one stage per rank calls; 2.13 prints 1F1B's order wrongly on the last rank."""
    stage = mock_stage(ranks, rank, ranks)
    stage.is_last, stage.is_first = rank == ranks - 1, rank == 0
    stage.get_fwd_recv_ops.return_value = stage.get_fwd_send_ops.return_value = []
    stage.get_bwd_recv_ops.return_value = stage.get_bwd_send_ops.return_value = []
    called: Listed = []
    stage.forward_one_chunk.side_effect = lambda k, *_, **__: called.append(("F", rank, k, False))
    stage.backward_one_chunk.side_effect = lambda k, *_, **__: called.append(("B", rank, k, False))
    schedule = getattr(pipelining, class_name)(stage, microbatches)
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
    return called


@pytest.mark.parametrize(("name", "class_name"), [("afab", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
def test_one_stage_per_rank(name: str, class_name: str) -> None:
    for ranks, microbatches in GRID:
        if legal(name, ranks, microbatches) is None:
            theirs = [single(class_name, ranks, rank, microbatches) for rank in range(ranks)]
            assert ours(build(name, ranks, microbatches)) == theirs, (ranks, microbatches)
        else:
            with pytest.raises(ValueError):
                single(class_name, ranks, 0, microbatches)


@pytest.mark.parametrize("name", MULTI)
def test_several_stages_per_rank(name: str) -> None:
    class_name, virtual = MULTI[name]
    for ranks, microbatches in GRID:
        for v in virtual:
            if legal(name, ranks, microbatches, v) is None:
                theirs = multi(class_name, ranks, microbatches, v)
                assert ours(build(name, ranks, microbatches, v)) == theirs, (ranks, microbatches, v)
            else:
                with pytest.raises(ValueError):
                    multi(class_name, ranks, microbatches, v)
