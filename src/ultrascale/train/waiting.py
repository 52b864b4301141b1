"""Finds the collective in which the main thread waits, and its axis, from the thread's stack."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType

import torch.distributed as dist
from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined]

from ultrascale.parallel.comm import AsyncCollective, Axis

UNNAMED = "unknown"
STACK_LINES = 12  # innermost frames that a report shows
_DISTRIBUTED = f"torch{os.sep}distributed{os.sep}"
_WRAPPERS = ("wrapper", "inner", "_fn")  # decorators of torch's collectives
_NAMES = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
}


def collective(error: BaseException | None = None) -> str | None:
    """`all_reduce over dp`, `recv over pp`, `all_gather of FSDP2, over dp`: where the main thread is, or an error was raised.

    None if it is in no collective that is visible from Python.
    """
    frames = list(_frames() if error is None else _frames_of(error))
    depth = next((depth for depth, frame in enumerate(frames) if _kind(frame) is not None), None)
    if depth is None:
        return None
    kind = _kind(frames[depth])
    return f"{'an exchange' if kind == UNNAMED else kind}{_axis_suffix(frames[depth:])}"


def stack() -> str:
    """The innermost lines of the main thread's stack."""
    lines = traceback.extract_stack(_main_frame())
    ours = [line for line in lines if f"{os.sep}multiprocessing{os.sep}" not in line.filename]
    return "".join(traceback.format_list(ours[-STACK_LINES:])).rstrip()


def _main_frame() -> FrameType | None:
    identity = threading.main_thread().ident
    return None if identity is None else sys._current_frames().get(identity)


def _frames() -> Iterator[FrameType]:
    """Innermost first."""
    frame = _main_frame()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frames_of(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]


def _kind(frame: FrameType) -> str | None:
    owner = frame.f_locals.get("self")
    if isinstance(owner, AsyncCollective):
        return owner.name
    work = frame.f_locals.get("work")
    if isinstance(work, dist.Work):  # the name of the local variable in pipeline.py and in torch
        return _op_name(work)
    name = frame.f_code.co_name
    return name if _DISTRIBUTED in frame.f_code.co_filename and name not in _WRAPPERS else None


def _op_name(work: dist.Work) -> str:
    number = int(work._get_op_type())  # type: ignore[attr-defined]
    name = next((name for name, kind in OpType.__members__.items() if int(kind) == number), "UNKNOWN")
    return _NAMES.get(name, name.lower())


def _axis_suffix(frames: list[FrameType]) -> str:
    """The axis, from the object that waits, or from the nearest frame outside torch.distributed."""
    if any(f"{os.sep}fsdp{os.sep}" in frame.f_code.co_filename for frame in frames):
        return " of FSDP2, over dp"
    ours = next((frame for frame in frames if _DISTRIBUTED not in frame.f_code.co_filename), None)
    if ours is None:
        return ""
    if _in(ours, "parallel", "pipeline.py"):
        return " over pp"
    owned = getattr(ours.f_locals.get("self"), "_axis", None)
    axis = owned if isinstance(owned, Axis) else ours.f_locals.get("axis")
    return f" over {axis.name}" if isinstance(axis, Axis) else ""


def _in(frame: FrameType, folder: str, file: str) -> bool:
    return frame.f_code.co_filename.endswith(os.path.join(folder, file))
