"""A schedule as a picture in text: one line per rank, one column per forward's time."""

from __future__ import annotations

from ultrascale.schedules.actions import Schedule
from ultrascale.schedules.simulate import StageTimes, simulate


def draw(schedule: Schedule, input_grad: int = 1, weight_grad: int = 1) -> str:
    """A Gantt chart with F = 1 column, I and W as given (whole columns), and sends that take no time.

    A cell names the kind and the micro-batch: capitals for a rank's first stage, small letters for its later ones.
    `-` continues a longer action, `+` is paired with the one before it, `.` is a bubble.
    """
    timeline = simulate(schedule, StageTimes.uniform(schedule.stages, 1.0, input_grad, weight_grad))
    width = len(str(schedule.microbatches - 1)) + 1 + any(a.paired for actions in schedule.actions for a in actions)
    columns = round(timeline.makespan_s)
    rows = [["." * width] * columns for _ in range(schedule.ranks)]
    joined: dict[tuple[int, int], str] = {}  # (rank, start) of a pair's forward: its label
    for rank, action, start_s, end_s in timeline.events:
        first = action.stage == schedule.stages_of(rank)[0]
        label = f"{action.kind if first else action.kind.lower()}{action.microbatch}"
        start, end = round(start_s), round(end_s)
        if action.paired:
            joined[rank, start] = label
            continue
        cells = [label, *["-" * width] * (end - start - 1)]
        if (rank, start) in joined:
            cells = [joined.pop((rank, start)), "+" + label, *cells[2:]]
        rows[rank][start:end] = cells
    name = len(str(schedule.ranks - 1))
    return "\n".join(
        f"rank {rank:>{name}} |" + " ".join(cell.ljust(width) for cell in row) + "|" for rank, row in enumerate(rows)
    )
