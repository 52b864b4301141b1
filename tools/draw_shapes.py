"""Pictures of the causal mask over context-parallel ranks and of the pipeline schedules; draw_docs.py writes them."""

from __future__ import annotations

from svg import LEFT, RIGHT, TOP, WIDTH, Sheet
from ultrascale.figures import style
from ultrascale.schedules import StageTimes, Timeline, build, simulate
from ultrascale.schedules.registry import REGISTRY
from ultrascale.specs.layout import ContextParallel

RANK_COLOURS = style.SERIES[:4]
KIND_COLOURS = {
    "F": style.COLORS["forward"],
    "B": style.COLORS["backward"],
    "I": style.COLORS["backward"],
    "W": style.COLORS["weight gradient"],
}
KIND_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
RANKS, BATCHES, ROW = 4, 8, 17
CP, SLICES, CELL = 4, 8, 26


def context_masks() -> str:
    """Who computes which block of the causal mask: the engine's own positions and blocks, one token a slice."""
    sheet = Sheet("Four ranks, eight slices of a sequence: who computes which block of the causal mask", 326)
    variants: tuple[ContextParallel, ...] = ("ring", "zigzag")
    for number, variant in enumerate(variants):
        _mask(sheet, LEFT - 20 + number * 380, TOP + 24, variant)
    return sheet.done()


def _mask(sheet: Sheet, left: int, top: int, variant: ContextParallel) -> None:
    sheet.text(left, top - 10, f"{variant}: rows are queries, columns keys")
    work = [0.0] * CP
    for rank, row, key in _blocks(variant):
        work[rank] += 1.0 if key < row else 0.5  # the mask halves a block on the diagonal
        sheet.rect(left + key * CELL, top + row * CELL, CELL - 1, CELL - 1, RANK_COLOURS[rank])
    mean, aside = sum(work) / CP, left + SLICES * CELL + 16
    for rank, done in enumerate(work):
        y = top + 24 + rank * 48
        sheet.rect(aside, y - 10, 12, 12, RANK_COLOURS[rank])
        sheet.text(aside + 16, y, f"rank {rank}")
        sheet.text(aside + 16, y + 15, f"{done / mean:.2f} of the mean", size=11)
    sheet.text(left, top + SLICES * CELL + 22, f"the slowest rank has {max(work) / mean:.2f} times the mean")


def _blocks(variant: ContextParallel) -> list[tuple[int, int, int]]:
    """(rank, query, key) of every pair that the mask leaves."""
    from ultrascale.parallel.comm import Axis
    from ultrascale.parallel.context import positions, visible

    ranks = tuple(range(CP))
    at = [positions(SLICES, Axis("cp", None, rank, CP, ranks), variant).tolist() for rank in ranks]
    found = []
    for rank in ranks:
        for owner in ranks:
            if (block := visible(variant, rank, owner, len(at[rank]))) is not None:
                pairs = [(row, key) for row in at[rank][block.rows] for key in at[owner][block.keys]]
                found += [(rank, row, key) for row, key in pairs if key <= row]
    return found


def pipeline() -> str:
    drawn = [(name, spec.least_stages, _timeline(name, spec.least_stages)) for name, spec in REGISTRY.items()]
    panel = RANKS * ROW + 34
    foot = TOP + len(drawn) * panel
    sheet = Sheet("One step of four ranks and eight micro-batches, with the same work in every schedule", foot + 24)
    scale = (WIDTH - LEFT - RIGHT) / max(timeline.makespan_s for *_, timeline in drawn)
    for number, (name, chunks, timeline) in enumerate(drawn):
        top = TOP + number * panel
        more = f", {chunks} stages per rank" if chunks > 1 else ""
        sheet.text(LEFT - 48, top - 4, f"{name}{more}: bubble {timeline.bubble_fraction:.1%} of the time")
        _gantt(sheet, top, scale, timeline)
    sheet.legend(foot + 6, {KIND_WORDS[kind]: colour for kind, colour in KIND_COLOURS.items()})
    return sheet.done()


def _timeline(name: str, chunks: int) -> Timeline:
    each = 1 / chunks
    return simulate(build(name, RANKS, BATCHES, chunks), StageTimes.uniform(RANKS * chunks, each, each, each))


def _gantt(sheet: Sheet, top: float, scale: float, timeline: Timeline) -> None:
    for rank in range(RANKS):
        sheet.text(LEFT - 8, top + rank * ROW + 14, f"rank {rank}", "end", 10)
    begun: set[tuple[int, float]] = set()
    for rank, action, start, end in timeline.events:
        second = (rank, start) in begun  # a pair shares its interval: one above the other
        begun.add((rank, start))
        pair = action.paired or second
        y = top + rank * ROW + (9 if second else 2)
        sheet.rect(LEFT + start * scale, y, (end - start) * scale - 1, 6 if pair else 13, KIND_COLOURS[action.kind])
        if not pair:
            sheet.text(LEFT + (start + end) / 2 * scale, y + 10, str(action.microbatch), "middle", 9, "#ffffff")
