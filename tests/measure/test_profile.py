"""Runs that are profiled for real, on CPUs: traces with named ranges, memory by owner, sums that add up, a full disk."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # before processes fork
from torch.autograd import profiler

from ultrascale.cost.estimate import estimate
from ultrascale.launch import launcher
from ultrascale.launch.cpu_rates import CPURates, LinkRate
from ultrascale.launch.machine import cpu_cluster
from ultrascale.measure.profile_memory import MAX_ROWS, MemoryTimeline, draw, from_record, thinned
from ultrascale.parallel import comm
from ultrascale.schedules import build
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.estimate import MEASURED_OWNERS
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.measurement import Measurement
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan

Run = Callable[..., tuple[int, str, str]]
MODEL = Model(name="small", layers=4, hidden=64, heads=4, kv_heads=2, ffn=192, vocab=256)


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that need not be measured again for every test."""
    rates, link = CPURates(1e10, 1e10, 5e-6, 5e9, 5e9, 5e8), LinkRate(1e9, 1e-4)
    monkeypatch.setattr(launcher, "detect_cluster", lambda world, precision, *_: cpu_cluster(world, rates, link, 2.0**34))


def planned(path: Path, **fields: Any) -> Path:
    layout = Layout(**{"mbs": 1, "gas": 4, **fields})
    job = Job(model=MODEL, cluster=Cluster.load(f"{layout.gpus}xh100"), seq=64, batch_tokens=layout.batch_tokens(64))
    Plan(job=job, layout=layout, estimate=estimate(job, layout)).save(path)
    return path


def profiled(run: Run, folder: Path, plan: Path, *words: Any) -> dict[str, Any]:
    code, printed, err = run("profile", plan, "--steps", 2, "-o", folder / "run", "--json", folder / "profile.json", *words)
    assert code == 0, err
    assert "findings" in printed
    found: dict[str, Any] = json.loads((folder / "profile.json").read_text())
    return found


def names_of(trace: Path) -> Counter[str]:
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    return Counter(one["name"] for one in events if one.get("cat") == "user_annotation")


def adds_up(rank: dict[str, Any]) -> None:
    for step in rank["steps"]:
        parts = sum(step[name] for name in ("computing_s", "exchanging_s", "both_s", "neither_s"))
        assert parts == pytest.approx(step["step_s"], rel=1e-6)
        assert min(value for value in step.values() if isinstance(value, float)) >= 0
        assert step["computing_s"] > 0
    steps = sum(step["exchanging_s"] for step in rank["steps"]) / len(rank["steps"])
    assert sum(each["exposed_s"] for each in rank["techniques"]) == pytest.approx(steps, rel=1e-6)


@pytest.mark.slow
def test_a_pipeline_with_data_ranks(run: Run, tmp_path: Path) -> None:
    found = profiled(run, tmp_path, planned(tmp_path / "plan.yaml", pp=2, dp=2, schedule="1f1b"), "--nproc", 4)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
    schedule = build("1f1b", 2, 4, 1)
    spoken = {"F": "forward", "B": "backward"}
    for rank in found["ranks"]:
        adds_up(rank)
        stage = rank["run"]["place"]["pp"]
        mine = [(spoken[one.kind.value], one.stage, one.microbatch) for one in schedule.actions[stage]]
        for step in rank["actions"]:
            assert [(one["name"], one["stage"], one["microbatch"]) for one in step] == mine
        names = names_of(tmp_path / "run" / "traces" / f"rank{rank['rank']}.json.gz")
        for action in mine:
            assert names["{} stage {} micro-batch {}".format(*action)] == 2, "once in each of two steps"
        assert names["optimizer"] == names["reading"] == names["gradients"] == names["forward and backward"] == 2
        assert names["data all_reduce"] == 2
        assert names["pipeline send"] == names["pipeline recv"] == 2 * 4
        assert names["pipeline wait"] >= 2 * 4
        assert sum(names[f"ProfilerStep#{number}"] for number in (3, 4)) == 2
        techniques = {each["technique"]: each for each in rank["techniques"]}
        assert set(techniques) == {"pipeline", "data", "bookkeeping"}
        assert techniques["data"]["kinds"] == {"all_reduce": 1}
        assert techniques["pipeline"]["kinds"] == {"send_recv": 8}
    bubble = found["bubble"]
    assert 0 < bubble["measured"] < 1
    assert 0 < bubble["scheduled"] < 1
    assert any(one.startswith("Pipeline bubble") and "the plan predicts" in one for one in found["findings"])
    assert {"computing", "waiting for stages"} <= {term["name"] for term in found["terms"]}

    code, printed, err = run("profile", "--trace", tmp_path / "run", "--plan", tmp_path / "plan.yaml")
    assert code == 0, err
    assert "Pipeline bubble" in printed
    code, _, err = run("profile", "--trace", tmp_path / "run", "--plan", other_model(tmp_path))
    assert code == 2
    assert "the plan is of wider" in err


def other_model(folder: Path) -> Path:
    plan = Plan.load(folder / "plan.yaml")
    other = plan.job.changed(model=MODEL.model_copy(update={"name": "wider", "layers": 6}))
    path = folder / "other.yaml"
    plan.model_copy(update={"job": other}).save(path)
    return path


def test_tensor_parallelism(run: Run, tmp_path: Path) -> None:
    found = profiled(run, tmp_path, planned(tmp_path / "plan.yaml", tp=2, gas=1, mbs=4), "--nproc", 2)
    for rank in found["ranks"]:
        adds_up(rank)
        tensor = next(each for each in rank["techniques"] if each["technique"] == "tensor")
        # With slices of the sequence a block gathers twice and scatters twice, forward and backward, and gathers again for the
        # weights' gradients; the embedding scatters, the head gathers (measure/rehearse_rank.py counts the same calls).
        assert tensor["kinds"]["all_gather"] >= 4 * 6
        assert tensor["kinds"]["reduce_scatter"] >= 4 * 4
        assert tensor["exposed_s"] > 0
        names = names_of(tmp_path / "run" / "traces" / f"rank{rank['rank']}.json.gz")
        assert names["tensor all_gather"] == 2 * tensor["kinds"]["all_gather"]
        assert names["tensor wait"] > 0


def test_torchs_fsdp_counts_as_zero(run: Run, tmp_path: Path) -> None:
    found = profiled(run, tmp_path, planned(tmp_path / "plan.yaml", dp=2, zero=3, gas=1), "--nproc", 2)
    for rank in found["ranks"]:
        adds_up(rank)
        zero = next(each for each in rank["techniques"] if each["technique"] == "zero")
        assert zero["kinds"]["reduce_scatter"] == MODEL.layers + 2, "each block, the embedding and the head"
        assert "unknown" not in {each["technique"] for each in rank["techniques"]}


def test_one_process_its_memory_and_a_full_disk(run: Run, tmp_path: Path) -> None:
    """/dev/full is a full disk: the trace is not written, its analysis is."""
    out = tmp_path / "run"
    kept = out / "traces" / "rank0.json.gz"
    kept.parent.mkdir(parents=True)
    kept.symlink_to("/dev/full")
    found = profiled(run, tmp_path, planned(tmp_path / "plan.yaml", gas=2))
    adds_up(found["ranks"][0])
    assert found["ranks"][0]["techniques"] == []
    assert found["notes"][0] == "the trace of rank 0 could not be written (the disk is full): make room, or give another --out"
    assert not kept.exists()
    assert any("no snapshot" in note for note in found["notes"])
    assert not any("perfetto" in note for note in found["notes"])
    timeline = json.loads((out / "memory" / "rank0.json").read_text())
    assert tuple(timeline["owners"]) == MEASURED_OWNERS
    assert len(timeline["time_s"]) == len(timeline["bytes"])
    assert timeline["time_s"] == sorted(timeline["time_s"])
    measured = Measurement.load(out / "measurement.json").memory[0].memory
    assert timeline["peak"]["bytes"] == measured.total, "the same step, the same peak"
    for owner in ("parameters", "optimizer", "gradients"):
        assert timeline["peak"][owner] == getattr(measured, owner)
    assert max(map(sum, timeline["bytes"])) == timeline["peak"]["bytes"]
    picture = (out / "memory" / "rank0.svg").read_text()
    assert picture.startswith("<svg")
    assert all(owner in picture for owner in MEASURED_OWNERS)
    assert not (out / "checkpoints").exists()


def test_missing_torch_names_the_package_to_install(tmp_path: Path) -> None:
    plan = planned(tmp_path / "plan.yaml")
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        f"sys.argv = ['ultrascale', 'profile', {str(plan)!r}, '-o', {str(tmp_path / 'run')!r}]\n"
        "from ultrascale.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'ultrascale[train]'" in done.stderr


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    plan = planned(tmp_path / "plan.yaml", tp=2, gas=1)
    words = ["profile", str(plan), "--steps", "1", "-o", str(tmp_path / "run")]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "ultrascale",
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("A step takes") == 1, "rank 0 alone speaks"
    assert len(list((tmp_path / "run" / "traces").iterdir())) == 2


def test_ranges_are_named_only_while_profiling(monkeypatch: pytest.MonkeyPatch) -> None:
    assert comm.profile_range("forward stage", 0) is comm.comm_range("tp", "wait"), "the same nothing"
    monkeypatch.setattr(profiler, "_is_profiler_enabled", True)
    named = comm.comm_range("tp", "wait")
    assert isinstance(named, profiler.record_function)
    assert named.name == "tensor wait"


def test_names_break_no_compiled_graph() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        with comm.profile_range("forward stage", 0):
            return x * 2

    one = torch.ones(2)
    before = doubled(one)
    with torch.profiler.profile() as profile, torch.compiler.set_stance("fail_on_recompile"):
        assert doubled(one).equal(before)
    assert "forward stage 0" not in {event.name for event in profile.events()}


def test_the_allocators_record_becomes_a_timeline() -> None:
    """States of 100 and 40 bytes; of 150 allocated before, ten have no owner. A gradient of 30 is allocated and stays."""
    events = [
        {"action": "alloc", "addr": 3, "size": 50, "time_us": 1_000_000},
        {"action": "segment_alloc", "addr": 900, "size": 2**20, "time_us": 1_000_001},
        {"action": "alloc", "addr": 4, "size": 30, "time_us": 1_000_002},
        {"action": "free_requested", "addr": 3, "size": 50, "time_us": 1_000_004},
        {"action": "free_completed", "addr": 3, "size": 50, "time_us": 1_000_004},
        {"action": "free_completed", "addr": 77, "size": 10, "time_us": 1_000_005},
    ]
    before = {1: ("parameters", 100), 2: ("optimizer", 40)}
    after = {**before, 4: ("gradients", 30)}
    rows = from_record(events, before, after, base=150)
    owners = [dict(zip(MEASURED_OWNERS, row[1:], strict=True)) for row in rows]
    assert [round(row[0] * 1e6) for row in rows] == [0, 2, 4, 5]
    assert [one["activations"] for one in owners] == [60, 60, 10, 0]
    assert [one["gradients"] for one in owners] == [0, 30, 30, 30]
    assert {(one["parameters"], one["optimizer"]) for one in owners} == {(100, 40)}


def test_a_thinned_timeline_keeps_its_peak_and_its_beginning() -> None:
    rows = [(float(place), 7.0, float(place % 977)) for place in range(50_000)]
    few = thinned(rows)
    assert len(few) <= MAX_ROWS + 1
    assert few[0] == rows[0]
    assert max(sum(row[1:]) for row in few) == 7.0 + 976.0
    picture = draw(MemoryTimeline(("parameters", "activations"), few, "by hand"), "a <title>", capacity=1200.0)
    assert "capacity 0.00 MiB" in picture
    assert "a &lt;title&gt;" in picture
    assert "capacity" not in draw(MemoryTimeline(("parameters", "activations"), few, "by hand"), "t", capacity=1e9)


def test_steps_of_a_batch_size_ramp_are_not_profiled(run: Run, tmp_path: Path) -> None:
    plan = planned(tmp_path / "plan.yaml", gas=2)
    half = Plan.load(plan).job.batch_tokens // 2
    code, _, err = run("profile", plan, f"train.batch_ramp={half}:{half}")
    assert code == 2
    assert f"leave it out, or try job.batch_tokens={half} for" in " ".join(err.split())
