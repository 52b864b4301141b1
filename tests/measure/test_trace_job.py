"""Traces of several ranks together: clocks, late ranks and causes, exposed communication, bubble, critical path; bad input."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from job_builders import analysed, data_parallel, group, rank_of
from trace_builders import Device, op, step, write

from ultrascale.measure import trace_job
from ultrascale.measure.trace_clocks import align, match
from ultrascale.measure.trace_merge import write_merged
from ultrascale.measure.trace_summary import summarise
from ultrascale.report.of_traces import traces_page

Run = Callable[..., tuple[int, str, str]]


def test_alignment_recovers_planted_clocks(tmp_path: Path) -> None:
    """Rank 1 is 5 s ahead and rank 2 half a second behind; rank 2 is late by 300 µs, which is no offset."""
    job = data_parallel(tmp_path, {2: 300.0}, "computing", clocks=(0.0, 5e6, -5e5), odd=True)
    assert [one.clock_us for one in job.ranks] == pytest.approx([0.0, 5e6, -5e5], abs=0.5)
    assert all(clock.spread_us < 0.5 for clock in job.clocks)
    assert [clock.rate for clock in job.clocks] == [1.0, 1.0, 1.0]
    assert job.stragglers[0].rank == 2


def test_alignment_recovers_a_drift(tmp_path: Path) -> None:
    """Clocks of ranks 1 and 2 run faster by 100 and 200 µs a second, over 2 s."""
    data_parallel(tmp_path, {}, "computing", steps=1000, drift=1e-4)
    ranks = trace_job.read([tmp_path])
    matched, _ = match(ranks)
    clocks = align(ranks, matched)
    assert [clock.rate - 1 for clock in clocks] == pytest.approx([0.0, -1e-4, -2e-4], rel=0.02)


def test_clocks_are_aligned_through_other_ranks(tmp_path: Path) -> None:
    """Rank 3 shares a group only with rank 1, which shares one with rank 0; the rest is a grid of 2 x 2."""
    rows, columns = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}, {0: (0, 2), 2: (0, 2), 1: (1, 3), 3: (1, 3)}
    clocks = (0.0, 1000.0, -2000.0, 4000.0)
    for rank in range(4):
        gpu = Device()
        for place in range(4):
            start = 500.0 * place
            gpu.kernel(start, start + 300, launched=start - 10)
            members, name = (rows[rank], "tp") if place % 2 else (columns[rank], "dp")
            gpu.collective(start + 300, start + 400, launched=start - 5, **group(f"{name}{min(members)}", name, 2))
        groups = {f"tp{min(rows[rank])}": rows[rank], f"dp{min(columns[rank])}": columns[rank]}
        rank_of(tmp_path, rank, [step(1, -20, 2000), *gpu.events], clocks[rank], 4, **groups)
    job = analysed(tmp_path)
    assert [one.clock_us for one in job.ranks] == pytest.approx(clocks, abs=0.5)
    assert job.matched == 8, "2 collectives of each of 4 groups"


@pytest.mark.parametrize("cause", ["computing", "data loading", "host"])
def test_the_planted_straggler_is_named_with_its_cause(tmp_path: Path, cause: str) -> None:
    """Rank 1 comes 300 µs later than the others, in each of 4 steps, whose clocks differ by a minute."""
    job = data_parallel(tmp_path, {1: 300.0}, cause, clocks=(0.0, 6e7, -6e7))
    first, *others = job.stragglers
    assert (first.rank, first.last, first.collectives) == (1, 4, 4)
    assert first.wait_s == pytest.approx(300e-6, rel=0.01)
    assert next(iter(first.causes)) == cause
    # Since the last collective: the optimizer's 50 µs and the gap to the next step are equal on all ranks.
    assert first.excess[cause] == pytest.approx(300e-6, rel=0.05)
    assert not [one for one in others if one.wait_s > 1e-6]
    assert [one.wait_s for one in job.ranks] == pytest.approx([300e-6, 0.0, 300e-6], abs=1e-6)
    assert job.findings[0].startswith(
        "Rank 1 delays the others by 300.0 µs a step (last to 4 of 4 collectives, most in data (mesh_dp, 3 ranks))"
    )


def test_ranks_that_arrive_together_are_not_late(tmp_path: Path) -> None:
    job = data_parallel(tmp_path, {}, "computing")
    assert job.findings[0].startswith("No rank is later than the others")
    assert sum(one.wait_s for one in job.ranks) < 1e-6


def test_shares_of_a_rank_add_up_and_exposed_communication_is_split(tmp_path: Path) -> None:
    """Rank 0: kernels 600 and 50, all-reduce 300 of waiting and 100 of transfer; 950 idle until the next step's kernel."""
    job = data_parallel(tmp_path, {1: 300.0}, "computing")
    one = job.ranks[0]
    parts = one.computing_s, one.data_s, one.wait_s, one.bubble_s, one.transfer_s, one.host_s
    assert sum(parts) == pytest.approx(one.step_s)
    assert (one.wait_s, one.transfer_s) == pytest.approx((300e-6, 100e-6), abs=1e-9)
    assert one.computing_s == pytest.approx(650e-6)
    (axis,) = job.axes
    assert axis.label == ("data", "mesh_dp", 3)
    assert axis.calls == 1
    assert axis.exposed_s == pytest.approx((400 + 100 + 400) / 3 * 1e-6)
    assert axis.wait_s == pytest.approx((300 + 0 + 300) / 3 * 1e-6)


def test_a_hidden_wait_delays_nobody(tmp_path: Path) -> None:
    """An all-reduce in which rank 0 is 300 µs early, while it computes."""
    for rank, begins in ((0, 100.0), (1, 400.0)):
        gpu = Device()
        gpu.kernel(0, 1000, launched=-10)
        gpu.collective(begins, 500, launched=-5, **group("0", "mesh_dp", 2))
        rank_of(tmp_path, rank, [step(1, -20, 2000), *gpu.events], **{"0": (0, 1)})
    job = analysed(tmp_path)
    assert [one.wait_s for one in job.ranks] == [0.0, 0.0]
    assert job.stragglers[0].wait_s == 0.0


def pipeline(folder: Path) -> trace_job.JobAnalysis:
    """Two stages, one micro-batch: stage 1 waits for its input until 210, stage 0 for its gradient from 200 to 620.

    Stage 0: forward 0-200, send 200-210, recv 210-620 (its own part of it 610-620), backward 620-1000.
    Stage 1: recv 0-210, forward and backward 210-610, send 610-620.
    """
    first, second = Device(), Device()
    first.kernel(0, 200, launched=-9)
    first.collective(200, 210, launched=-8, kind="SendRecv", **group("pp", "mesh_pp", 2, "send", **{"Dst Rank": 1}))
    first.collective(210, 620, launched=-7, kind="SendRecv", **group("pp", "mesh_pp", 2, "recv", **{"Src Rank": 1}))
    first.kernel(620, 1000, launched=-6)
    second.collective(0, 210, launched=-9, kind="SendRecv", **group("pp", "mesh_pp", 2, "recv", **{"Src Rank": 0}))
    second.kernel(210, 610, launched=-8)
    second.collective(610, 620, launched=-7, kind="SendRecv", **group("pp", "mesh_pp", 2, "send", **{"Dst Rank": 0}))
    for rank, gpu in enumerate((first, second)):
        rank_of(folder, rank, [step(1, -20, 1000), *gpu.events], pp=(0, 1))
    return analysed(folder)


def test_the_bubble_by_stage_is_the_wait_for_messages(tmp_path: Path) -> None:
    job = pipeline(tmp_path)
    assert [(one.stage, one.ranks) for one in job.stages] == [(0, 1), (1, 1)]
    assert [one.bubble_s[0] for one in job.stages] == pytest.approx([420e-6, 220e-6])
    assert [one.share for one in job.stages] == pytest.approx([0.42, 220 / 620])
    assert not job.stragglers, "a schedule's waits are no rank's fault"


def test_the_critical_path_follows_the_messages(tmp_path: Path) -> None:
    """Forward on stage 0, its message, all of stage 1, its message, backward on stage 0: 1,000 µs without a gap."""
    (path,) = pipeline(tmp_path).paths
    assert [(part.rank, part.what) for part in path.parts] == [
        (0, "computing"),
        (1, "pipeline communication"),
        (1, "computing"),
        (0, "pipeline communication"),
        (0, "computing"),
    ]
    assert path.length_s == pytest.approx(1000e-6)
    assert path.by_what == pytest.approx({"computing": 980e-6, "pipeline communication": 20e-6})


def test_the_critical_path_goes_over_the_late_rank(tmp_path: Path) -> None:
    job = data_parallel(tmp_path, {1: 300.0}, "computing")
    path = job.paths[0]
    assert path.by_what["computing"] == pytest.approx(950e-6, rel=0.01), "900 on rank 1, and the optimizer"
    assert path.by_rank[1] == pytest.approx(900e-6, rel=0.01)


def test_kernels_of_a_cuda_graph_are_on_the_path(tmp_path: Path) -> None:
    """One launch for all kernels, and collectives without a process group: the only one is theirs."""
    for rank, first in ((0, 300.0), (1, 700.0)):
        launch = {**op("cudaGraphLaunch", -20, -10), "cat": "cuda_runtime", "args": {"correlation": 1}}
        events = [launch]
        for name, start, end in (("gemm", 0.0, first), ("ncclDevKernel_AllReduce", first, 800.0), ("gemm", 800.0, 900.0)):
            kernel = op(name, start, end, tid=7)
            events.append({**kernel, "cat": "kernel", "args": {"stream": 7, "correlation": 1}})
        rank_of(tmp_path, rank, [step(1, -50, 900), *events], **{"0": (0, 1)})
    job = analysed(tmp_path)
    assert job.stragglers[0].rank == 1
    assert job.paths[0].by_rank == pytest.approx({1: 700e-6, 0: 200e-6})


def test_a_slow_link_is_named(tmp_path: Path) -> None:
    """Three groups of two ranks that arrive together; in one the same all-reduce takes 400 µs and not 100."""
    for rank in range(6):
        gpu, pair = Device(), rank // 2
        end = 500.0 + (400 if pair == 1 else 100)
        gpu.kernel(0, 500, launched=-10)
        gpu.collective(500, end, launched=-5, **group(f"tp{pair}", "mesh_tp", 2))
        rank_of(tmp_path, rank, [step(1, -20, 2000), *gpu.events], world=6, **{f"tp{pair}": (2 * pair, 2 * pair + 1)})
    finding = next(one for one in analysed(tmp_path).findings if one.startswith("Link"))
    assert "tensor (mesh_tp, 2 ranks) of ranks 2, 3 transfers for 400.0 µs a step" in finding
    assert "other groups for 100.0 µs" in finding


def figures_of(page: str) -> dict[str, object]:
    return {
        name: json.loads(data)
        for name, data in re.findall(r'<script type="application/json" id="([a-z-]+)">(.*?)</script>', page)
    }


def test_the_page_stands_alone(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    job = data_parallel(tmp_path, {1: 300.0}, "computing")
    page = traces_page(job, "page.perfetto.json.gz")
    figures = figures_of(page)
    assert set(figures) == {"rank-shares", "late-ranks", "critical-path"}
    heat = figures["late-ranks"]
    assert isinstance(heat, dict)
    assert max(heat["data"][0]["z"][1]) == pytest.approx(0.3, rel=0.01), "rank 1, in ms"
    body = re.sub(r"<script>.{100000,}?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r'(?:src|href)="(?!#)', body), "nothing is fetched"
    assert "Rank 1 delays the others by 300.0 µs a step" in body


def test_the_merged_trace_is_aligned_and_thinned(tmp_path: Path) -> None:
    data_parallel(tmp_path / "in", {1: 300.0}, "computing", clocks=(0.0, 6e7, -6e7), odd=True)
    ranks = trace_job.read([tmp_path / "in"])
    matched, _ = match(ranks)
    notes = write_merged(tmp_path / "all.perfetto.json.gz", ranks, align(ranks, matched))
    with gzip.open(tmp_path / "all.perfetto.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    ends = {
        rank: [one["ts"] + one["dur"] for one in events if one.get("pid") == rank and str(one["name"]).startswith("nccl")]
        for rank in range(3)
    }
    assert ends[0] == pytest.approx(ends[1], abs=0.5)
    assert ends[0][1:] == pytest.approx(ends[2][1:], abs=0.5)
    assert len(ends[0]) == 4
    assert {one["args"]["name"] for one in events if one["name"] == "process_name"} == {
        f"rank {n} on node{n}" for n in range(3)
    }
    assert notes == []
    short = summarise(tmp_path / "in" / "rank0.json", 10)
    assert (len(short.timeline.start), short.timeline.left_out) == (10, 6)


def test_commands_write_a_page_and_compare(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly")
    data_parallel(tmp_path / "a", {1: 300.0}, "computing")
    data_parallel(tmp_path / "b", {}, "computing")
    monkeypatch.setenv("COLUMNS", "80")
    files = sorted((tmp_path / "a").iterdir())
    code, printed, err = run("profile", "--trace", *files, "-o", tmp_path / "out" / "page.html", "--json", tmp_path / "a.json")
    assert code == 0, err
    assert "Rank 1 delays the others by 300.0 µs a step" in printed
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["page.html", "page.perfetto.json.gz"]
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["job"]["stragglers"][0]["causes"] == pytest.approx({"computing": 300e-6}, rel=0.01)
    code, printed, err = run("profile", "--trace", tmp_path / "a", "--against", tmp_path / "b", "--json", tmp_path / "c.json")
    assert code == 0, err
    assert "A step of a takes" in printed
    terms = {term["name"]: term for term in json.loads((tmp_path / "c.json").read_text())["terms"]}
    assert terms["waits for late ranks"]["first"] == pytest.approx(200e-6, rel=0.01)
    code, _, err = run("profile", "--trace", tmp_path / "out" / "page.perfetto.json.gz")
    assert (code, "is a merged trace of all ranks" in err) == (2, True)


def test_missing_and_cut_off_ranks_are_noted(run: Run, tmp_path: Path) -> None:
    data_parallel(tmp_path, {1: 300.0}, "computing")
    (tmp_path / "rank2.json").unlink()
    text = (tmp_path / "rank1.json").read_text()
    (tmp_path / "rank1.json").write_text(text[: int(0.97 * len(text))])
    code, printed, err = run("profile", "--trace", tmp_path)
    assert code == 0, err
    assert "rank 2 of 3 is missing" in printed
    assert "was cut off" in printed


def test_traces_that_are_not_of_one_job_are_refused(run: Run, tmp_path: Path) -> None:
    def refused(*words: object) -> str:
        before = sorted(tmp_path.rglob("*"))
        code, _, err = run("profile", "--trace", *words, "-o", tmp_path / "page.html")
        assert code == 2
        assert sorted(tmp_path.rglob("*")) == before, "nothing is written"
        return err

    events = [step(1, 0, 100), op("aten::mm", 10, 90)]
    one = write(tmp_path / "rank0.json", events, rank=0)
    assert "rank 0 is in" in refused(one, write(tmp_path / "again.json", events, rank=0))
    other = write(tmp_path / "rank1.json", events, distributedInfo={"rank": 1, "world_size": 8})
    assert "different jobs: world size is 2" in refused(one, other)
    later = write(tmp_path / "rank1.json", [step(7, 0, 100), op("aten::mm", 10, 90)], rank=1)
    assert "no step in common" in refused(one, later)
    whole = write(later, [op("aten::mm", 10, 90), step(1, 0, 100)], rank=1).read_text()
    later.write_text(whole[: whole.index("ProfilerStep")])
    assert "is cut off" in refused(one, later)
    code, _, err = run("profile", "--trace", one, "-o", tmp_path / "folder")
    assert (code, "try page.html" in err) == (2, True)
    code, _, err = run("profile", "plan.yaml", "--against", one)
    assert (code, "--against goes with --trace" in err) == (2, True)


def test_ranks_without_a_common_collective_are_shown_unaligned(run: Run, tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.json", [step(1, 0, 100), op("aten::mm", 10, 90)], rank=rank)
    code, printed, err = run("profile", "--trace", tmp_path)
    assert code == 0, err
    assert "no collective in common" in printed
