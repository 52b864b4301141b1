"""What `profile` does with files that exist: traces of one rank or of all, two runs compared, dumps of a job that hangs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ultrascale.cli.common import NO, echo, progress, terminal, write_json
from ultrascale.specs.errors import SpecError
from ultrascale.specs.folders import TRACES

if TYPE_CHECKING:
    from ultrascale.measure.trace_analysis import Analysis
    from ultrascale.measure.trace_job import JobAnalysis
    from ultrascale.measure.trace_summary import RankSummary
    from ultrascale.specs.plan import Plan

ONE_OF = "profile takes a plan to run, or --trace: try `ultrascale profile plan.yaml`, or `profile --trace runs/x`"


def all_named(traces: list[Path], words: list[str]) -> list[Path]:
    """With the files that a shell puts behind `--trace rank*.json.gz`: all but the first are words of their own."""
    from ultrascale.measure.trace_analysis import SUFFIXES
    from ultrascale.measure.trace_nsight import REPORT

    more = [Path(word) for word in words]
    if any(not path.name.endswith((*SUFFIXES, REPORT)) and not path.is_dir() for path in more):
        raise SpecError(ONE_OF)
    return [*traces, *more]


def show_analysis(found: Analysis, json_file: Path | None) -> None:
    from ultrascale.show import profile as show

    show.show(terminal(), found)
    write_json(json_file, show.as_json(found))


def read_traces(traces: list[Path], against: list[Path], out: Path | None, plan: Path | None, json_file: Path | None) -> None:
    from ultrascale.measure import trace_analysis
    from ultrascale.specs.plan import Plan

    if out is not None and not out.name.endswith((".html", trace_analysis.MERGED)):
        raise SpecError(
            f"--out is {out} but with --trace it is a page or a merged trace: try page.html, or merged{trace_analysis.MERGED}"
        )
    if against and (plan is not None or out is not None):
        raise SpecError("--against compares two runs in the terminal: leave --plan and --out out")
    beside = None if plan is None else Plan.load(plan)
    if against:
        _compare(traces, against, json_file)
    elif out is None and len(trace_analysis.files(traces)) == 1:
        with progress() as say:
            say("reading traces")
            found = trace_analysis.analyse(trace_analysis.read(traces), beside)
        show_analysis(found, json_file)
    else:
        _show_job(traces, beside, out, json_file)


def _job(traces: list[Path]) -> tuple[list[RankSummary], JobAnalysis]:
    from ultrascale.measure import trace_job

    with progress() as say:
        ranks = trace_job.read(traces, say)
        say("comparing ranks")
        one = traces[0].parent if traces[0].name == TRACES else traces[0]  # a run's folder
        name = one.name if len(traces) == 1 else f"{len(traces):,} files"
        return ranks, trace_job.analyse(ranks, name)


def _show_job(traces: list[Path], plan: Plan | None, out: Path | None, json_file: Path | None) -> None:
    from ultrascale.measure import trace_analysis
    from ultrascale.show import profile, profile_job

    ranks, job = _job(traces)
    found = trace_analysis.analyse([one.times for one in ranks], plan)
    written = [] if out is None else _write(out, ranks, job)
    profile.show(terminal(), found)
    if len(ranks) > 1:
        profile_job.show(terminal(), job)
    for line in written:
        echo(line)
    write_json(json_file, {**profile.as_json(found), "job": profile_job.as_json(job)})


def _write(out: Path, ranks: list[RankSummary], job: JobAnalysis) -> list[str]:
    """The page and the merged trace, or this alone; what to print about them."""
    from ultrascale.measure.trace_analysis import MERGED
    from ultrascale.measure.trace_merge import write_merged
    from ultrascale.specs.files import write_text

    merged = out if out.name.endswith(MERGED) else out.with_name(f"{out.stem}{MERGED}")
    page = None
    if merged != out:
        from ultrascale.report.of_traces import traces_page

        page = traces_page(job, merged.name)
    notes = write_merged(merged, ranks, job.clocks)
    if page is not None:
        write_text(out, page, "page.html")
    return [*([f"wrote {out}"] if page else []), f"wrote {merged}, for ui.perfetto.dev", *(f"note: {note}" for note in notes)]


def _compare(first: list[Path], second: list[Path], json_file: Path | None) -> None:
    from ultrascale.show import profile_job

    (_, one), (_, other) = _job(first), _job(second)
    profile_job.show_comparison(terminal(), one, other)
    write_json(json_file, profile_job.comparison_json(one, other))


def read_dumps(dumps: list[Path], json_file: Path | None) -> None:
    from ultrascale.measure import flight_recorder, nccl_ras
    from ultrascale.show import flight_recorder as show

    with progress() as say:
        found = nccl_ras.read(dumps[0]) if len(dumps) == 1 and dumps[0].is_file() else None
        found = found or flight_recorder.analyse(*flight_recorder.read(dumps, say))
    show.show(terminal(), found)
    write_json(json_file, show.as_json(found))
    if found.problems:
        raise typer.Exit(NO)
