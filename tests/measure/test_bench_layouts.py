"""`bench layouts`: configurations from words, every result of a trial, a study that is stored, resumed and pruned."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest

from conftest import Run
from ultrascale.cost.estimate import estimate
from ultrascale.launch import launcher, machine
from ultrascale.measure import bench_layouts as layouts
from ultrascale.measure import bench_layouts_study as layouts_storage
from ultrascale.measure import bench_trial as trial
from ultrascale.measure.bench_layouts import CandidateSet, LayoutCandidate, Sweep, TrialRecord, TrialRow, verdict
from ultrascale.measure.bench_layouts_study import Study, clearly_slower, study_name
from ultrascale.measure.bench_trial import TrialFailure, TrialResult, TrialStep
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.measurement import Measurement
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    job = Job(model=Model.load("tiny"), cluster=Cluster.load("2xh100"), seq=64, batch_tokens=8 * 64, precision="fp32")
    layout = Layout(dp=2, mbs=2, gas=2)
    return Plan(job=job, layout=layout, estimate=estimate(job, layout))


@pytest.fixture
def candidates(plan: Plan) -> CandidateSet:
    return layouts.varied(plan, layouts.base_request(plan, None, 4, 0), "mbs=1:2:4", None)


def in_file(tmp_path: Path, name: str = "tiny") -> Study:
    return Study(f"sqlite:///{tmp_path / 'study.db'}", name)


def result(rate: float) -> TrialResult:
    values = {
        "step_time_s": 1.0, "tokens_per_s": rate, "tokens_per_s_per_gpu": rate, "model_tflops_per_gpu": 1.0, "peak_gib": 1.0,
        "peak_stage": 0, "steps": 2, "processes": 2, "device": "cpu", "time": {},
        "memory": [{"stage": 0, "layers": 1, "memory": dict.fromkeys(trial.OWNERS, 2.0**28)}],
    }  # fmt: skip
    return TrialResult(Measurement(**values), None, 1.0, 1.0)


class FakeRunner:
    """In place of trial.run: answers of each configuration, by its micro-batch."""

    def __init__(self, answers: dict[int, Any]) -> None:
        self.answers, self.ran = answers, list[int]()

    def __call__(self, request: Any, folder: Path, cluster: Any, limit_s: float, look: Any) -> TrialResult | TrialFailure:
        self.ran.append(request.layout.mbs)
        answer = self.answers[request.layout.mbs]
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, list):  # tokens/s step by step, until it is stopped early
            for number, rate in enumerate(answer, 3):
                if look([TrialStep(number, rate)]):
                    return TrialFailure("stopped", f"stopped after step {number}")
            return result(answer[-1])
        return answer if isinstance(answer, TrialFailure) else result(answer)


def fake_runner(monkeypatch: pytest.MonkeyPatch, answers: dict[int, Any]) -> FakeRunner:
    runner = FakeRunner(answers)
    monkeypatch.setattr(trial, "run", runner)
    return runner


# Candidates


def test_varying_a_field_keeps_the_batch(plan: Plan) -> None:
    base = layouts.base_request(plan, None, 5, 0)
    found = layouts.varied(plan, base, "tp,mbs,recompute", None)
    names = [one.name for one in found.candidates]
    assert names == ["the plan", "tp=2", "mbs=1", "mbs=4", "recompute=selective", "recompute=full"]
    by_name = {one.name: one.layout for one in found.candidates}
    assert by_name["the plan"] == plan.layout
    assert by_name["tp=2"] == plan.layout.changed(tp=2, dp=1, gas=4)
    assert by_name["mbs=4"] == plan.layout.changed(mbs=4, gas=1)
    assert all(one.layout.batch_tokens(64) == 8 * 64 for one in found.candidates)
    assert all(one.request.training.steps == 5 for one in found.candidates)
    assert not any(one.request.checkpoint.save for one in found.candidates)


def test_duplicate_layouts_are_measured_once(plan: Plan) -> None:
    found = layouts.varied(plan, layouts.base_request(plan, None, 5, 0), "mbs=4,gas=1", None)
    assert [one.name for one in found.candidates] == ["the plan", "mbs=4"]


def test_unrunnable_layouts_are_skipped_with_a_reason(plan: Plan) -> None:
    found = layouts.varied(plan, layouts.base_request(plan, None, 5, 0), "ep,schedule=1f1b:afab,mbs=3", None)
    assert [one.name for one in found.candidates] == ["the plan"]
    assert [line.split(":")[0] for line in found.left_out] == ["ep=2", "schedule=afab", "mbs=3"]
    assert "experts" in found.left_out[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [("tpp", "did you mean 'tp'"), ("", "names no field"), ("mbs=two", "whole number"), ("recompute=some", "selective")],
)
def test_options_that_vary_nothing_are_refused(plan: Plan, words: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        layouts.varied(plan, layouts.base_request(plan, None, 5, 0), words, None)


def test_the_planner_ranks_what_the_engine_runs(plan: Plan) -> None:
    base = layouts.base_request(plan, None, 5, 0)
    here = Cluster.load("2xh100")
    found = layouts.ranked(base, here, 3)
    assert [one.name for one in found.candidates] == ["#1", "#2", "#3"]
    predicted = [one.predicted.step_time_s for one in found.candidates if one.predicted]
    assert predicted == sorted(predicted)
    assert found.ranked
    won = layouts.winning_plan(found, found.candidates[1], here)
    assert won.layout == found.candidates[1].layout
    assert won.estimate.step_time_s == predicted[1]


def test_processes_follow_from_plan_and_machine(plan: Plan) -> None:
    assert layouts.base_request(plan, 4, 5, 0).layout.dp == 4
    with pytest.raises(SpecError, match="try --nproc 1"):
        layouts.base_request(plan, None, 5, 1)
    wide = plan.model_copy(update={"layout": plan.layout.changed(dp=64)})
    with pytest.raises(SpecError, match="such as --nproc 2"):
        layouts.base_request(wide, None, 5, 0)


def test_durations() -> None:
    assert [layouts.duration(text, "--budget") for text in ("30m", "90", "1.5h", " 5 s")] == [1800, 90, 5400, 5]
    for bad in ("soon", "0m", "-3", "5d"):
        with pytest.raises(SpecError, match="such as 30m"):
            layouts.duration(bad, "--budget")


# Trials that really run


def test_a_trial_is_the_engines_own_run(plan: Plan, tmp_path: Path) -> None:
    steps: list[TrialStep] = []
    ended = trial.run(
        layouts.base_request(plan, None, 5, 0), tmp_path / "run", None, 120, lambda new: steps.extend(new) or False
    )
    assert isinstance(ended, TrialResult)
    assert Measurement.load(tmp_path / "run" / "measurement.json") == ended.measured
    assert [step.number for step in steps] == [3, 4, 5]  # the first two are warm-up
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert ended.loss == last["loss"]
    assert steps[-1].tokens_per_s == pytest.approx(2 * last["tokens_per_s_per_gpu"])


def test_a_killed_rank_is_a_trial_failure(plan: Plan, tmp_path: Path) -> None:
    request = layouts.base_request(plan, None, 500, 0)
    killed: list[int] = []

    def kill_a_rank(new: list[TrialStep]) -> bool:
        if new and not killed:
            (leader,) = multiprocessing.active_children()
            assert leader.pid is not None
            killed.append(children(leader.pid)[-1])
            os.kill(killed[0], signal.SIGKILL)
        return False

    ended = trial.run(request, tmp_path / "run", None, 120, kill_a_rank)
    assert isinstance(ended, TrialFailure)
    assert ended.kind == "killed"
    assert "rank 1" in ended.reason
    assert "SIGKILL" in ended.reason


def children(pid: int) -> list[int]:
    """Of the process, in the order of their start."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_killed_trial_is_a_failure_and_its_ranks_end(plan: Plan, tmp_path: Path) -> None:
    ranks: list[int] = []

    def kill_the_trial(new: list[TrialStep]) -> bool:
        if new and not ranks:
            (leader,) = multiprocessing.active_children()
            assert leader.pid is not None
            ranks.extend(children(leader.pid))
            os.kill(leader.pid, signal.SIGKILL)
        return False

    ended = trial.run(layouts.base_request(plan, None, 500, 0), tmp_path / "run", None, 120, kill_the_trial)
    assert isinstance(ended, TrialFailure)
    assert (ended.kind, "without a word" in ended.reason) == ("killed", True)
    assert len(ranks) == 2
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_out_of_memory_is_a_trial_failure(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real refusal of the system: address space for 64 MiB more than there is."""
    train = launcher.train

    def limited(*words: Any, **more: Any) -> Any:
        resident = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (resident + 2**26, resource.RLIM_INFINITY))
        return train(*words, **more)

    monkeypatch.setattr(launcher, "train", limited)
    wide = Model.load("tiny").model_copy(update={"ffn": 64 * 1024, "name": "wide"})
    job = plan.job.changed(model=wide, cluster=Cluster.load("1xh100"))
    big = plan.model_copy(update={"job": job, "layout": Layout(mbs=8)})
    ended = trial.run(layouts.base_request(big, None, 4, 0), tmp_path / "run", None, 120)
    assert isinstance(ended, TrialFailure)
    assert ended.kind == "out of memory", ended


def test_hangs_and_crashes_are_trial_failures(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "train", lambda *_, **__: time.sleep(60))
    request = layouts.base_request(plan, None, 4, 0)
    ended = trial.run(request, tmp_path / "a", None, 0.5)
    assert isinstance(ended, TrialFailure)
    assert (ended.kind, "no end within" in ended.reason) == ("timed out", True)

    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(launcher, "train", broken)
    assert trial.run(request, tmp_path / "b", None, 60) == TrialFailure("crashed", "ValueError: no such kernel")


def test_failure_reasons_are_one_sentence() -> None:
    error = "rank 1 (tp 1) failed:\nTraceback (most recent call last):\n  File x\nValueError: bad\nThis was rank 1, at step 2"
    assert trial.failure(RunError(error)) == TrialFailure("crashed", "ValueError: bad")
    killed = "rank 0 failed:\nthe process ended without a word (signal SIGKILL: the system's out-of-memory killer struck)"
    assert trial.failure(RunError(killed)).kind == "out of memory"
    stuck = "rank 0 has not moved for 600 s: step 3, forward and backward, waiting in all_reduce\nrank 1 is stopped"
    assert trial.failure(RunError(stuck)) == TrialFailure("timed out", stuck.splitlines()[0])
    assert trial.failure(MemoryError()).kind == "out of memory"
    assert trial.failure(SpecError("layout.tp is 3")) == TrialFailure("refused", "layout.tp is 3")


# The study


def test_every_result_is_stored_and_no_trial_repeated(
    candidates: CandidateSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = TrialFailure("out of memory", "rank 0 ran out of memory at step 1")
    runner = fake_runner(monkeypatch, {2: 100.0, 1: failed, 4: 150.0})
    rows = Sweep(candidates, in_file(tmp_path), tmp_path, None, 60).run()
    assert runner.ran == [2, 1, 4]
    states = [(row.record.state, row.record.tokens_per_s, row.record.reason) for row in rows if row.record]
    assert states == [("measured", 100.0, ""), ("failed", None, failed.reason), ("measured", 150.0, "")]
    assert rows[0].record is not None
    assert rows[0].record.tensors_gib == 6 * 2**28 / 2**30
    found = verdict(rows)
    assert found is not None
    assert found.winner.candidate.name == "mbs=4"
    assert found.regret == pytest.approx(0.5)
    again = Sweep(candidates, in_file(tmp_path), tmp_path, None, 60).run()  # as another process would
    assert runner.ran == [2, 1, 4]
    assert [row.record for row in again] == [row.record for row in rows]


def test_ctrl_c_keeps_finished_trials_and_the_rest_resumes(
    candidates: CandidateSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_runner(monkeypatch, {2: 100.0, 1: KeyboardInterrupt(), 4: 1.0})
    sweep = Sweep(candidates, in_file(tmp_path), tmp_path, None, 60)
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    assert [row.record.state for row in sweep.rows if row.record] == ["measured", "failed", "waiting"]
    assert [row.record.finished for row in sweep.rows if row.record] == [True, False, False]
    runner = fake_runner(monkeypatch, {1: 70.0, 4: 80.0})
    rows = Sweep(candidates, in_file(tmp_path), tmp_path, None, 60).run()
    assert sorted(runner.ran) == [1, 4]
    assert [row.record.tokens_per_s for row in rows if row.record] == [100.0, 70.0, 80.0]


def test_a_killed_sweep_resumes(candidates: CandidateSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of a running trial is dead: the next process marks it so and runs it again."""

    def claims_and_dies() -> None:
        study = in_file(tmp_path)
        study.offer(candidates.candidates, False)
        study.claim([candidates.candidates[0].layout])
        os._exit(9)

    process = multiprocessing.get_context("fork").Process(target=claims_and_dies)
    process.start()
    process.join()
    study = in_file(tmp_path)
    assert study.records()[candidates.candidates[0].layout].state == "running"
    runner = fake_runner(monkeypatch, {2: 100.0, 1: 1.0, 4: 2.0})
    rows = Sweep(candidates, study, tmp_path, None, 60).run()
    assert sorted(runner.ran) == [1, 2, 4]
    assert [row.record.state for row in rows if row.record] == ["measured"] * 3
    dead = study.study.get_trials(states=(optuna.trial.TrialState.FAIL,))
    assert [one.user_attrs["reason"] for one in dead] == ["the process that ran it is gone"]


def test_a_trial_of_an_unresponsive_machine_is_reclaimed(candidates: CandidateSet, tmp_path: Path) -> None:
    study = in_file(tmp_path)
    study.offer(candidates.candidates, False)
    claimed = study.claim([candidates.candidates[0].layout])
    assert claimed is not None
    study._note(claimed[1], owner={"host": "another", "pid": 1})
    study.fail_orphans()
    assert study.records()[claimed[0]].state == "running"  # its heartbeat is recent
    with sqlite3.connect(tmp_path / "study.db") as database:
        database.execute("update trial_heartbeats set heartbeat = datetime('now', '-2 minutes')")
    study.fail_orphans()
    record = study.records()[claimed[0]]
    assert (record.state, record.kind, record.reason) == ("failed", "interrupted", "the machine that ran it fell silent")
    # It was only slow: its late result changes nothing.
    assert not study.report(claimed[1], [TrialStep(3, 1.0)])
    study.finish(claimed[1], result(5.0), 1.0, tmp_path)
    assert study.records()[claimed[0]] == record


def test_slow_trials_stop_early_only_when_ranked(
    candidates: CandidateSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [30.0, 100.0, 70.0, 60.0, 99.0]  # medians of two, three, four steps: 65 is below 80 of the best's hundred
    fake_runner(monkeypatch, {2: [100.0] * 5, 1: slow, 4: [90.0] * 5})
    race = replace(candidates, ranked=True)
    rows = Sweep(race, in_file(tmp_path), tmp_path, None, 60).run()
    ends = [(row.record.state, row.record.reason, row.record.tokens_per_s) for row in rows if row.record]
    assert ends == [("measured", "", 100.0), ("stopped early", "stopped after step 4", 65.0), ("measured", "", 90.0)]
    assert verdict(rows).regret == 0.0  # type: ignore[union-attr]
    varied = Sweep(candidates, in_file(tmp_path), tmp_path, None, 60).run()  # wants it measured to the end
    assert [row.record.state for row in varied if row.record] == ["measured"] * 3


def test_a_trial_is_stopped_after_enough_steps_and_only_beside_a_better_one() -> None:
    assert not clearly_slower([1.0] * 5, best=0.0)
    assert not clearly_slower([1.0], best=100.0)
    assert clearly_slower([1.0, 1.0], best=100.0)


def test_trials_beyond_the_budget_stay_pending(
    candidates: CandidateSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(layouts, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    limits: list[float] = []

    def slow(request: Any, folder: Path, cluster: Any, limit_s: float, look: Any) -> TrialFailure:
        limits.append(limit_s)
        clock[0] += limit_s
        return TrialFailure("timed out", "no end")

    monkeypatch.setattr(trial, "run", slow)
    ended = Sweep(candidates, in_file(tmp_path), tmp_path, None, 60, budget_s=5.0).run()
    assert limits == [5.0]
    kinds = [(row.record.state, row.record.kind) for row in ended if row.record]
    assert kinds == [("failed", "interrupted"), ("waiting", ""), ("waiting", "")]


def test_regret_of_a_failed_first_choice_is_unknown(candidates: CandidateSet) -> None:
    first, second, _ = candidates.candidates
    rows = (TrialRow(first, TrialRecord(0, "failed", reason="x")), TrialRow(second, TrialRecord(1, "measured", 10.0)))
    found = verdict(rows)
    assert found is not None
    assert found.regret is None
    assert verdict((TrialRow(first),)) is None


def test_studies_are_of_one_job(plan: Plan) -> None:
    base = layouts.base_request(plan, None, 5, 0)
    name = study_name(base, "cpu")
    assert name.startswith("tiny, 8 × 64 tokens, fp32, 2 × cpu, 5 steps")
    others = [
        study_name(base, "NVIDIA H200"),
        study_name(layouts.base_request(plan, 4, 5, 0), "cpu"),
        study_name(layouts.base_request(plan, None, 6, 0), "cpu"),
        study_name(replace(base, job=base.job.changed(optimizer="sgd")), "cpu"),
    ]
    assert len({name, *others}) == 5
    assert study_name(replace(base, layout=base.layout.changed(mbs=1, gas=4)), "cpu") == name


# Databases that cannot


def test_a_locked_database_is_a_clear_error(candidates: CandidateSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts_storage, "LOCK_WAIT_S", 0.1)
    study = in_file(tmp_path)
    other = sqlite3.connect(tmp_path / "study.db", isolation_level=None)
    other.execute("begin exclusive")
    with pytest.raises(RunError, match=r"locked by another process.*the same command goes on"):
        study.offer(candidates.candidates, False)
    other.close()


def test_a_full_disk_keeps_finished_trials(candidates: CandidateSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's own word for it, from a file that may not grow."""
    study = in_file(tmp_path)
    fake_runner(monkeypatch, {2: 100.0, 1: 50.0, 4: 60.0})
    sweep = Sweep(replace(candidates, candidates=candidates.candidates[:1]), study, tmp_path, None, 60)
    sweep.run()

    @optuna.storages._rdb.storage.sqlalchemy.event.listens_for(study.storage.engine, "connect")  # type: ignore[attr-defined]
    def full(connection: Any, _: Any) -> None:
        connection.execute("pragma max_page_count = 1")

    more = [synthetic_candidate(candidates, number) for number in range(50)]
    with pytest.raises(RunError, match=r"disk of sqlite.*is full: make room.*goes on"):
        study.offer(more, False)
    assert in_file(tmp_path).records()[candidates.candidates[0].layout].tokens_per_s == 100.0


def synthetic_candidate(candidates: CandidateSet, number: int) -> LayoutCandidate:
    one = candidates.candidates[0]
    return replace(one, request=replace(one.request, layout=one.layout.changed(gas=100 + number)))


def test_one_process_at_a_time_on_a_file(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    code = "import sys, time\nfrom ultrascale.measure.bench_layouts_study import lock_file\n"
    code += "with lock_file(sys.argv[1]):\n print(1, flush=True)\n time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code, url], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(SpecError, match="in use by another bench"), layouts_storage.lock_file(url):
            pass
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("study.db", "such as sqlite"),
        ("mysql://me:secret@host/x", "such as sqlite"),
        ("postgresql://me:secret@127.0.0.1:1/none", r"cannot be opened \("),
    ],
)
def test_invalid_storage_is_refused(url: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as error:
        Study(url, "x")
    assert "secret" not in str(error.value)


# The command


def test_the_command_measures_and_resumes(plan: Plan, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_names", list)
    monkeypatch.setattr(launcher, "detect_cluster", lambda *_: Cluster.load("2xh100"))
    file = plan.save(tmp_path / "plan.yaml")
    words = ("bench", "layouts", file, "-o", tmp_path / "out", "--steps", "4")
    code, out, err = run(*words, "--budget", "2m", "--top", "2", "--json", tmp_path / "out.json")
    assert code == 0, err
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["trials"][0]["trial"]["state"] == "measured"
    assert written["regret"] is not None
    assert "Fastest" in out
    winner = Plan.load(tmp_path / "out" / "winner.yaml")
    names = {one["name"]: one["layout"] for one in written["trials"]}
    assert winner.layout.model_dump(mode="json") == names[written["winner"]]
    assert "tokens/s; 1 of 2" in err
    monkeypatch.setattr(trial, "run", None)  # nothing is left to run
    code, _, err = run(*words, "--budget", "2m", "--top", "2")
    assert code == 0
    assert "known: #1" in err


@pytest.mark.slow
def test_a_killed_bench_leaves_no_process_and_resumes(plan: Plan, tmp_path: Path) -> None:
    """kill -9 of the command itself, in the middle of a trial."""
    file = plan.save(tmp_path / "plan.yaml")
    words = [sys.executable, "-m", "ultrascale", "bench", "layouts", file, "--vary", "mbs=2:4", "-o", tmp_path / "out"]
    bench = subprocess.Popen([*words, "--steps", "400"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    metrics = tmp_path / "out" / "trials" / "000" / "metrics.jsonl"
    until = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text()):
        assert time.monotonic() < until
        assert bench.poll() is None
        time.sleep(0.05)
    (leader,) = children(bench.pid)
    family = [leader, *children(leader)]
    bench.kill()
    bench.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in family):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    json_file = tmp_path / "told.json"
    ended = subprocess.run([*words, "--steps", "400", "--budget", "1s", "--json", json_file], capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr  # a second is too short for any trial to end
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'out' / 'study.db'}")
    reasons = [one.user_attrs.get("reason") for one in study.get_trials()]
    assert "the process that ran it is gone" in reasons
    assert layouts.BUDGET in reasons


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--vary tp,mbs,recompute or --budget 30m"),
        (("--budget", "soon"), "such as 30m"),
        (("--vary", "x"), "--vary mbs=1:2:4"),
    ],
)
def test_the_command_refuses(
    plan: Plan, run: Run, tmp_path: Path, words: tuple[str, ...], message: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(machine, "gpu_names", list)
    monkeypatch.setattr(launcher, "detect_cluster", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    code, _, error = run("bench", "layouts", plan.save(tmp_path / "plan.yaml"), *words)
    assert code == 2
    assert message in error


def test_missing_optuna_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SpecError, match=r"pip install 'ultrascale\[bench\]'"):
        layouts.import_optuna()


def test_the_command_reports_missing_optuna(plan: Plan, tmp_path: Path) -> None:
    """In a process of its own: here everything that wants optuna is long imported."""
    file = plan.save(tmp_path / "plan.yaml")
    words = f"sys.modules['optuna'] = None; sys.argv = ['ultrascale', 'bench', 'layouts', {str(file)!r}, '--vary', 'mbs']"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {words}; from ultrascale.cli import main; main()"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "pip install 'ultrascale[bench]'" in done.stderr
    assert "Traceback" not in done.stderr
