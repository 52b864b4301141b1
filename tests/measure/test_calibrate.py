"""Calibration: known constants are recovered, unidentifiable ones keep defaults, and held-out runs decide."""

from __future__ import annotations

import io
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from conftest import Run
from ultrascale import Cluster, Job, Layout, Model, estimate
from ultrascale.launch.cpu_rates import CPURates, LinkRate
from ultrascale.launch.machine import cpu_cluster
from ultrascale.measure.calibrate import (
    CalibratedRun,
    Calibration,
    ConstantVerdict,
    _better,
    calibrate,
    fit_memory,
    measured_peak,
)
from ultrascale.measure.calibrate_fit import InitialConstants, fit
from ultrascale.measure.calibrate_fit import StepTimeModel as Fitted
from ultrascale.measure.calibrate_runs import CalibrationRun, _one_machine, load
from ultrascale.show.calibrate import show_calibration
from ultrascale.specs.efficiency import Efficiency
from ultrascale.specs.errors import SpecError
from ultrascale.specs.framework import Framework
from ultrascale.specs.measurement import MeasuredMemory, MeasuredStage, MeasuredTime, Measurement
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import GIB

TRUTH = Efficiency(matmul=0.95, attention_forward=0.44, attention_backward=0.344, kernel_launch_s=1.5e-5)
SHAPES = (
    ("smollm2-135m", 1024, 1),
    ("smollm2-360m", 2048, 2),
    ("llama-3.2-1b", 16384, 1),
    ("llama-3.2-1b", 2048, 4),
    ("smollm2-1.7b", 4096, 4),
)


def job_of(model: str, seq: int, layout: Layout, gpus: int = 1) -> Job:
    return Job(
        model=Model.load(model),
        cluster=Cluster.load(f"{gpus}xh100"),
        seq=seq,
        batch_tokens=layout.batch_tokens(seq),
        framework=Framework.load("ultrascale").model_copy(update={"cuda_graphs": False}),  # launches must count
    )


def simulated_run(
    model: str, seq: int, layout: Layout, truth: Efficiency = TRUTH, gpus: int = 1, name: str = ""
) -> CalibrationRun:
    """A run as the laws say it under other constants than those of its plan."""
    job = job_of(model, seq, layout, gpus)
    real = job.changed(cluster=job.cluster.model_copy(update={"efficiency": truth}))
    return CalibrationRun(name or f"{model}-{seq}-{layout}", job, layout, estimate(real, layout).step_time_s)


def simulated_runs(truth: Efficiency = TRUTH) -> list[CalibrationRun]:
    return [simulated_run(model, seq, Layout(mbs=mbs), truth) for model, seq, mbs in SHAPES]


def verdict(found: Calibration, name: str) -> ConstantVerdict:
    return next(one for one in found.verdicts if one.name == name)


@pytest.fixture(scope="module")
def recovered() -> Calibration:
    return calibrate(simulated_runs())


def test_known_constants_are_recovered(recovered: Calibration) -> None:
    given = recovered.cluster.efficiency
    assert given.matmul == pytest.approx(0.95, rel=0.02)
    assert given.attention_forward == pytest.approx(0.44, rel=0.04)
    assert given.attention_backward == pytest.approx(0.344, rel=0.04)
    assert given.kernel_launch_s == pytest.approx(1.5e-5, rel=0.05)
    after = recovered.errors("after")
    assert after is not None
    assert after.worst < 0.015
    assert recovered.improved


def test_unidentifiable_constants_keep_defaults_and_name_the_missing_run(recovered: Calibration) -> None:
    for name, run in (("link_bandwidth", "layout.tp=2"), ("network_bandwidth", "two nodes"), ("matmul_fp8", "fp8")):
        one = verdict(recovered, name)
        assert one.known is None
        assert one.after == one.before
        assert "no step time follows it" in one.why
        assert run in one.why
    assert recovered.cluster.efficiency.link_bandwidth is None
    assert recovered.cluster.efficiency.network_bandwidth == Efficiency().network_bandwidth


def test_a_cluster_names_the_source_of_its_constants(recovered: Calibration, tmp_path: Path) -> None:
    again = Cluster.load(recovered.cluster.save(tmp_path / "cluster.yaml"))
    assert again == recovered.cluster
    origin = again.calibrated
    assert origin is not None
    assert (origin.runs, origin.processes) == (5, 1)
    assert {"matmul", "attention", "kernel_launch_s"} <= set(origin.constants)
    job = job_of("llama-3.2-1b", 4096, Layout()).changed(cluster=again)
    assert any("fitted to 5 runs" in note for note in estimate(job, Layout()).notes)


def test_what_is_printed(recovered: Calibration) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    show_calibration(console, recovered, Path("cluster.yaml"))
    text = console.export_text()
    assert "1xh100: constants fitted to 5 runs" in text
    assert "link_bandwidth, 0.9621: no step time follows it in these runs; what would: a run with layout.tp=2" in text
    assert "on runs left out" in text
    assert "ultrascale plan --cluster cluster.yaml" in text


def test_one_shape_identifies_one_constant() -> None:
    runs = [replace(simulated_run("smollm2-1.7b", 4096, Layout(mbs=4)), name=str(number)) for number in range(4)]
    found = calibrate(runs)
    fitted = [one.name for one in found.verdicts if one.known is not None]
    assert fitted == ["matmul"]
    assert "cannot tell it from matmul" in verdict(found, "attention").why
    assert verdict(found, "matmul_ramp").known is None


def test_two_gpus_identify_the_link() -> None:
    truth = TRUTH.model_copy(update={"link_bandwidth": 0.4})
    cut = [simulated_run("llama-3.2-1b", seq, Layout(tp=2, mbs=mbs), truth, gpus=2) for seq, mbs in ((2048, 8), (4096, 2))]
    found = calibrate([*simulated_runs()[2:], *cut])
    assert found.base.gpus == 2
    assert verdict(found, "link_bandwidth").known is not None
    assert verdict(found, "link_bandwidth").after == pytest.approx(0.4, rel=0.15)
    assert verdict(found, "network_bandwidth").known is None


def test_a_run_that_alone_identifies_a_constant_is_not_used_for_validation() -> None:
    small, _, *large = simulated_runs()
    found = calibrate(
        [small, *large, simulated_run("llama-3.2-1b", 8192, Layout(mbs=2)), simulated_run("smollm2-1.7b", 2048, Layout(mbs=8))]
    )
    judged = found.runs[0]
    assert "kernel_launch_s" in judged.alone
    assert judged.left_out_s < 0.8 * judged.step_s < judged.after_s
    assert judged not in found.judges()
    left_out = found.errors("left_out")
    assert left_out is not None
    assert left_out.worst < 0.1


def test_constants_worse_on_held_out_runs_are_rejected(run: Run, tmp_path: Path) -> None:
    """Runs that no constants fit: the same few shapes, each at random half as fast or twice as fast as the plan says."""
    rng, base = random.Random(2), Efficiency()
    runs = [replace(one, step_s=one.step_s * math.exp(rng.choice((-0.6, 0.6)))) for one in simulated_runs(base)]
    write(tmp_path / "runs.jsonl", runs, extra_gib=base.workspace_gib)
    code, out, error = run("calibrate", tmp_path / "runs.jsonl", "-o", tmp_path / "cluster.yaml", "--json")
    assert code == 1, error
    found = json.loads(out)
    assert not found["improved"]
    assert "calibrated" not in found["cluster"]
    assert found["cluster"]["efficiency"] == {}
    assert not (tmp_path / "cluster.yaml").exists()


def test_the_median_held_out_error_decides() -> None:
    def judged(left_out: float, alone: tuple[str, ...] = ()) -> CalibratedRun:
        return CalibratedRun("x", 1.0, 1.04, 1.0, left_out, 0.0, alone)

    def better(*runs: CalibratedRun) -> bool:
        cluster = Cluster.load("1xh100")
        return _better(Calibration(cluster, cluster, (ConstantVerdict("matmul", 1.0, 0.9, 0.01),), runs))

    assert better(judged(1.01), judged(0.98), judged(1.5))
    assert not better(judged(1.06), judged(0.94), judged(1.0))
    assert better(judged(1.01), judged(1.06, ("attention",)), judged(1.06, ("attention",)))
    assert not better(judged(1.0, ("attention",)))


def test_memory_is_fitted_where_times_need_no_fit(tmp_path: Path) -> None:
    """Times that nothing explains, as above; but what an allocator holds beside is the same in all."""
    rng, base = random.Random(2), Efficiency()
    runs = [replace(one, step_s=one.step_s * math.exp(rng.choice((-0.6, 0.6)))) for one in simulated_runs(base)]
    write(tmp_path / "runs.jsonl", runs, extra_gib=0.07)
    found = calibrate(load([tmp_path / "runs.jsonl"]))
    assert found.improved
    assert found.cluster.efficiency.matmul is None
    assert found.cluster.efficiency.workspace_gib == pytest.approx(0.07, abs=1e-3)
    assert verdict(found, "matmul").why == "on runs left out what was fitted is no better"
    assert all(run.before_s == run.after_s == run.left_out_s for run in found.runs)
    assert found.cluster.calibrated is not None
    assert "workspace_gib" in found.cluster.calibrated.constants
    assert "matmul" not in found.cluster.calibrated.constants


def measurement(one: CalibrationRun, holes: float | None = 0.0, extra_gib: float = 0.0) -> Measurement:
    real = estimate(one.job, one.layout).memory[0].memory
    states = {name: getattr(real, name) for name in ("parameters", "master", "gradients", "optimizer", "buffers")}
    tensors = MeasuredMemory(**states, activations=real.activations + extra_gib * GIB, runtime=holes)
    return Measurement(
        step_time_s=one.step_s,
        tokens_per_s=1,
        tokens_per_s_per_gpu=1,
        model_tflops_per_gpu=1,
        peak_gib=tensors.total / GIB,
        peak_stage=0,
        memory=(MeasuredStage(stage=0, layers=1, memory=tensors),),
        time=MeasuredTime(),
        steps=10,
        processes=one.layout.gpus,
        device="NVIDIA H100 80GB HBM3",
    )


def write(path: Path, runs: list[CalibrationRun], extra_gib: float = 0.0) -> None:
    def line(one: CalibrationRun) -> str:
        plan = Plan(job=one.job, layout=one.layout, estimate=estimate(one.job, one.layout)).to_mapping()
        measured = measurement(one, extra_gib=extra_gib).model_dump(mode="json")
        return json.dumps({"run": one.name, "job": plan["job"], "layout": plan["layout"], "measurement": measured})

    path.write_text("\n".join(map(line, runs)) + "\n")


def folder(path: Path, one: CalibrationRun) -> Path:
    path.mkdir(parents=True)
    Plan(job=one.job, layout=one.layout, estimate=estimate(one.job, one.layout)).save(path / "plan.yaml")
    measurement(one).save(path / "measurement.json")
    return path


def test_the_verb_from_folders_to_a_plan(run: Run, tmp_path: Path) -> None:
    for number, one in enumerate(simulated_runs()):
        folder(tmp_path / "runs" / str(number), one)
    (tmp_path / "runs" / "unfinished").mkdir()  # of a run that is still going on
    code, out, error = run("calibrate", tmp_path / "runs", "-o", tmp_path / "cluster.yaml", "--json")
    assert code == 0, error
    found = json.loads(out)
    assert found["improved"]
    assert found["errors"]["step_time"]["after"]["middle"] < found["errors"]["step_time"]["before"]["middle"]
    assert {"matmul"} <= {one["name"] for one in found["constants"] if one["fitted"]}
    assert len(found["runs"]) == 5
    code, out, error = run(
        "plan", "llama-3.2-1b", "--cluster", tmp_path / "cluster.yaml", "--batch-tokens", "64k", "--seq", "4k"
    )
    assert code == 0, error


def test_workspaces_and_holes_of_an_allocator(tmp_path: Path) -> None:
    write(tmp_path / "runs.jsonl", simulated_runs(), extra_gib=0.07)
    runs = load([tmp_path / "runs.jsonl"])
    base = InitialConstants.of(runs[0].job)
    peaks = [measured_peak(base, one) for one in runs]
    found = fit_memory([replace(one, holes=0.1 * one.moving) for one in peaks if one is not None])
    assert found["workspace_gib"] == pytest.approx(0.07, abs=1e-3)
    assert found["allocator_slack"] == pytest.approx(0.1, rel=0.01)
    assert fit_memory([replace(one, holes=None) for one in peaks if one is not None]) == {}


def test_unusable_runs_are_refused(run: Run, tmp_path: Path) -> None:
    one = simulated_runs()[3]
    folder(tmp_path / "whole", one)
    folder(tmp_path / "no-plan", one)
    (tmp_path / "no-plan" / "plan.yaml").unlink()
    folder(tmp_path / "unmeasured", one)
    (tmp_path / "unmeasured" / "measurement.json").unlink()
    (tmp_path / "empty").mkdir()
    other = replace(one, job=one.job.changed(cluster=Cluster.load("1xh200")))
    folder(tmp_path / "other-kind", other)
    on_cpu = folder(tmp_path / "cpu", one)
    measurement(one).model_copy(update={"device": "cpu"}).save(on_cpu / "measurement.json")
    (tmp_path / "bad.jsonl").write_text('{"run": "x"}\n')
    (tmp_path / "file.txt").write_text("x")
    for names, words in (
        (["nowhere"], "does not exist"),
        (["no-plan"], "has no plan.yaml"),
        (["unmeasured"], "has no measurement.json"),
        (["empty"], "holds no measured run"),
        (["whole", "other-kind"], "ran on h100 and"),
        (["cpu"], "ran on cpu but its plan is of h100"),
        (["bad.jsonl"], "line 1, is no run"),
        (["file.txt"], "neither a run's folder nor a table"),
        (["whole"], "needs at least 3 runs"),
    ):
        code, _, error = run("calibrate", *(tmp_path / name for name in names))
        assert code == 2, names
        assert words in " ".join(error.split()), error


def test_process_counts_of_a_cpu_are_separate_machines() -> None:
    one = simulated_runs()[0]
    slow = one.job.cluster.model_copy(update={"efficiency": Efficiency(synchronous=True)})
    alone = replace(one, job=one.job.changed(cluster=slow))
    two = replace(alone, name="two", layout=Layout(dp=2))
    said: list[str] = []
    assert _one_machine([alone, two, replace(two, name="three")], said.append) == [two, replace(two, name="three")]
    assert said[0].startswith("1 of the 3 runs are left out: they had 1 processes, not 2")


def test_unfinished_runs_among_several_are_left_out(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.yaml").write_text("")
    said: list[str] = []
    with pytest.raises(SpecError, match="no runs to calibrate with"):
        load([tmp_path / "first", tmp_path / "second"], said.append)
    assert len(said) == 2
    assert "first is left out: it has no measurement.json" in said[0]


def test_a_table_of_own_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(
        "id,model,seq_len,gpu,gpus,micro_batch,grad_accum,recompute,precision,tokens_per_s_per_gpu\n"
        "a,llama-3.2-1b,2048,h100,1,4,1,none,bf16,50000\n"
        "b,llama-3.2-1b,4096,h100,1,2,1,none,bf16,48000\n"
    )
    first, second = load([tmp_path / "mine.csv"])
    assert first.step_s == pytest.approx(4 * 2048 / 50000)
    assert second.layout.mbs == 2
    assert first.memory is None


def test_cpu_constants_are_recovered_from_independent_runs() -> None:
    base = cpu_cluster(1, CPURates(2e11, 3e10, 1.2e-5, 1.5e11, 1e11, 1e9), LinkRate(1e9, 1e-4), 2.0**34)
    truth = base.efficiency.model_copy(update={"matmul": 1.4, "kernel_launch_s": 4e-6, "softmax_gscores_s": 1.5})
    shapes = (
        ("mini", 256, 4, 2, "none"),
        ("tiny", 512, 4, 2, "none"),
        ("tiny", 128, 1, 4, "none"),
        ("mini", 128, 2, 2, "full"),
    )
    runs = []
    for model, seq, mbs, gas, recompute in shapes:
        layout = Layout(mbs=mbs, gas=gas, recompute=recompute)
        job = Job(model=Model.load(model), cluster=base, seq=seq, batch_tokens=layout.batch_tokens(seq), precision="fp32")
        real = job.changed(cluster=base.model_copy(update={"efficiency": truth}))
        runs.append(CalibrationRun(f"{model}-{seq}-{mbs}", job, layout, estimate(real, layout).step_time_s, 0.02))
    found = fit(Fitted(InitialConstants.of(runs[0].job), runs), range(len(runs)))
    named = {
        constant.name: InitialConstants.of(runs[0].job).shifted(constant, by)[constant.fields[0]]
        for constant, by in found.moves.items()
    }
    assert set(named) == {"matmul", "kernel_launch_s", "softmax_gscores_s"}
    for name, value in named.items():
        assert value == pytest.approx(getattr(truth, name), rel=0.1)
