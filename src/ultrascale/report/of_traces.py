"""The report of all ranks' traces: who is late and why, where each rank's time goes, critical path, exposed communication."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from ultrascale import __version__
from ultrascale.figures import traces as figures
from ultrascale.measure.trace_job import JobAnalysis, axis, longest_path
from ultrascale.report.page import Section, bullets, chart, page, table, tiles, words
from ultrascale.specs.units import seconds

MOST_ROWS = 64  # of the table of ranks


def traces_page(job: JobAnalysis, merged: str | None) -> str:
    """`merged`: name of the merged trace beside the page."""
    beside = f" The merged trace beside this page, {merged}, opens in ui.perfetto.dev." if merged else ""
    subtitle = (
        f"{len(job.ranks):,} ranks, {len(job.steps):,} steps, {job.matched:,} collectives in common; times are of a mean step."
    )
    footer = f"Written by ultrascale {__version__} from torch.profiler's traces.{beside}"
    return page(f"Traces of {job.name}", subtitle, list(_sections(job)), footer)


def _sections(job: JobAnalysis) -> Iterator[Section]:
    yield Section("Answer", (tiles(list(_headline(job))), bullets(job.findings), bullets(job.notes)))
    yield Section("Ranks", (chart(figures.rank_shares(job), "rank-shares"), _rank_table(job)))
    if job.stragglers and job.matched:
        yield Section("Stragglers", (chart(figures.late_ranks(job), "late-ranks"), _straggler_table(job)))
    longest = longest_path(job)
    yield Section("Critical path", (chart(figures.critical_path(longest), "critical-path"), _path_table(job)))
    if job.axes:
        yield Section("Exposed communication", (_axis_table(job),))
    if job.stages:
        yield Section("Pipeline bubble", (_stage_table(job),))
    yield Section("Words", (words(_WORDS),))


_WORDS = (
    "Wait: from a rank's arrival at a collective to the last rank's. Transfer: from then to the end. Exposed: while the rank "
    "computes nothing. Host: neither kernels nor operators run and nothing is waited for. Clocks are aligned by the ends of "
    "collectives, at which ranks leave together."
)


def _headline(job: JobAnalysis) -> Iterator[tuple[str, str]]:
    step = job.mean("step_s")
    yield "mean step", seconds(step)
    for name, (field, _) in figures.SHARES.items():
        if job.mean(field):
            yield name, f"{job.mean(field) / step:.0%}"


def _rank_table(job: JobAnalysis) -> str:
    head = ("rank", "machine", "step", *figures.SHARES, "causes wait of", "clock ahead by", "clock's spread")
    rows = [
        (
            str(one.rank),
            one.host or "–",
            seconds(one.step_s),
            *(seconds(getattr(one, field)) for field, _ in figures.SHARES.values()),
            seconds(one.caused_s),
            _signed(one.clock_us),
            seconds(clock.spread_us * 1e-6) if clock.collectives else "–",
        )
        for one, clock in list(zip(job.ranks, job.clocks, strict=True))[:MOST_ROWS]
    ]
    return table(head, rows, numbers=tuple(range(2, len(head))))


def _signed(time_us: float) -> str:
    return f"{'-' if time_us < 0 else ''}{seconds(abs(time_us) * 1e-6)}"


def _straggler_table(job: JobAnalysis) -> str:
    head = ("rank", "others wait", "last to", "because of", "most in")
    rows = [
        (
            str(one.rank),
            seconds(one.wait_s),
            f"{one.last:,} of {one.collectives:,}",
            ", ".join(f"{cause} {seconds(time)}" for cause, time in list(one.causes.items())[:3]) or "–",
            axis(next(iter(one.groups))),
        )
        for one in job.stragglers[:16]
    ]
    return table(head, rows, numbers=(1, 2))


def _path_table(job: JobAnalysis) -> str:
    head = ("step", "length", "spent on", "on ranks")
    rows = [
        (
            path.step,
            seconds(path.length_s),
            ", ".join(f"{what} {seconds(time)}" for what, time in list(path.by_what.items())[:5]),
            ", ".join(f"{rank} ({time / path.length_s:.0%})" for rank, time in list(path.by_rank.items())[:4]),
        )
        for path in job.paths[:50]
    ]
    return table(head, rows, numbers=(1,))


def _axis_table(job: JobAnalysis) -> str:
    head = ("technique", "group", "ranks", "collectives", "exposed", "of it waits", "of it transfers")
    rows = [
        (
            one.label.technique,
            one.label.description or "–",
            f"{one.label.size:,}" if one.label.size else "–",
            f"{one.calls:,.0f}",
            seconds(one.exposed_s),
            "–" if one.wait_s is None else seconds(one.wait_s),
            "–" if one.wait_s is None else seconds(one.exposed_s - one.wait_s),
        )
        for one in job.axes
    ]
    return table(head, rows, numbers=(2, 3, 4, 5, 6))


def _stage_table(job: JobAnalysis) -> str:
    head = ("stage", "ranks", "waits for messages", "of the step", "by step")
    rows = [
        (
            str(one.stage),
            f"{one.ranks:,}",
            seconds(mean(one.bubble_s)),
            f"{one.share:.0%}",
            ", ".join(seconds(time) for time in one.bubble_s[:10]),
        )
        for one in job.stages
    ]
    return table(head, rows, numbers=(0, 1, 2, 3))
