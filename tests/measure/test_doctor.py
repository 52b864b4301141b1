"""What the doctor finds, from facts put in by hand; and that it finds them on the machine that runs this."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from conftest import Run
from ultrascale.cost.estimate import estimate
from ultrascale.measure import doctor
from ultrascale.measure import doctor_facts as facts
from ultrascale.measure import doctor_facts as nvidia
from ultrascale.measure.doctor import Finding, machine_findings, plan_findings
from ultrascale.measure.doctor_facts import Disk, GPUFact, MachineFacts
from ultrascale.show import doctor as show
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import GIB

LAPTOP = MachineFacts(
    python="3.11.7",
    packages={"torch": "2.13.0+cpu", "numpy": "2.4.6", "safetensors": "0.8.0"},
    cores=8,
    memory_bytes=32 * GIB,
    free_memory_bytes=24 * GIB,
    interfaces=("eth0", "lo"),
    open_files=65536,
    shared_memory_bytes=16 * GIB,
    disk=Disk("/home/me/runs", 500 * GIB, write_bytes_s=1e9),
    now_s=2e9,
    newest_file_s=1.9e9,
)
H100 = "NVIDIA H100 80GB HBM3"
PAIRS = {(f"GPU{one}", f"GPU{other}"): "NV18" for one in range(8) for other in range(one + 1, 8)}
NODE = replace(
    LAPTOP,
    packages={**LAPTOP.packages, "torch": "2.13.0"},
    torch_cuda="12.8",
    gpus=tuple(GPUFact(str(index), H100, "570.86", 79.6 * GIB, 79.1 * GIB) for index in range(8)),
    links=PAIRS,
    infiniband={f"mlx5_{index}:1": "ACTIVE, 400 Gb/sec (4X NDR)" for index in range(8)},
)
TORCHRUN = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def changed(base: MachineFacts, **fields: Any) -> MachineFacts:
    return replace(base, **fields)


def packages(base: MachineFacts, **versions: str | None) -> MachineFacts:
    return replace(base, packages={**base.packages, **versions})


def environment(base: MachineFacts, given: Mapping[str, str], **more: str | None) -> MachineFacts:
    together = {**given, **more}
    return replace(base, environment={name: value for name, value in together.items() if value is not None})


def found(findings: list[Finding], name: str) -> Finding:
    (one,) = [finding for finding in findings if finding.name == name]
    return one


@pytest.mark.parametrize("base", [LAPTOP, NODE, environment(NODE, TORCHRUN)])
def test_a_good_machine_has_no_findings(base: MachineFacts) -> None:
    assert [finding for finding in machine_findings(base) if finding.level != "ok"] == []


GPU = NODE.gpus[0]
CASES: dict[str, tuple[MachineFacts, str, str, str]] = {
    "no torch": (packages(LAPTOP, torch=None), "torch", "bad", "torch is not installed"),
    "old torch": (packages(LAPTOP, torch="2.9.1"), "torch", "bad", "2.9.1 is older than 2.11"),
    "torch without CUDA": (changed(NODE, torch_cuda=None), "torch", "bad", "the 8 GPUs here would stand idle"),
    "no safetensors": (packages(LAPTOP, safetensors=None), "python", "warn", "no safetensors"),
    "no memory": (changed(LAPTOP, free_memory_bytes=GIB / 2), "cpu and memory", "warn", "0.5 of 32.0 GiB"),
    "driver gone": (changed(LAPTOP, gpu_problem="nvidia-smi: no driver"), "GPUs", "warn", "no driver"),
    "no GPU": (LAPTOP, "GPUs", "ok", "runs use the CPU"),
    "GPUs hidden": (environment(LAPTOP, {}, CUDA_VISIBLE_DEVICES=""), "GPUs", "ok", "CUDA_VISIBLE_DEVICES=''"),
    "GPU in use": (
        changed(NODE, gpus=(*NODE.gpus[:7], replace(GPU, index="7", free_bytes=20 * GIB))),
        "GPUs",
        "warn",
        "GPU 7 has 20.0 of 79.6 GiB",
    ),
    "GPUs mixed": (changed(NODE, gpus=(GPU, replace(GPU, name="NVIDIA H200"))), "GPUs", "warn", "sets the pace"),
    "GPU unknown": (changed(NODE, gpus=(replace(GPU, name="NVIDIA L40"),)), "GPUs", "warn", "no peak of this kind"),
    "Hopper without FlashAttention": (NODE, "attention", "ok", r"pip install 'ultrascale\[flash\]'"),
    "with it": (packages(NODE, **{"flash-attn-4": "4.0.0b36"}), "attention", "ok", "FlashAttention 4.0.0b36 where a run finds"),
    "kernels timed": (changed(NODE, timed_shapes=3), "attention", "ok", r"; 3 shapes timed before \(.*kernels.json\)$"),
    "half installed": (
        changed(
            packages(NODE, **{"flash-attn-4": "4.0.0b36"}), import_problems={"flash-attn-4": "RuntimeError: No CTK flavor"}
        ),
        "attention",
        "warn",
        r"flash-attn-4 cannot be imported \(RuntimeError: No CTK flavor\): runs use torch's kernels",
    ),
    "Ampere": (
        changed(NODE, gpus=(replace(GPU, name="NVIDIA A100-SXM4-80GB"),)),
        "attention",
        "ok",
        "^torch's kernels$",
    ),
    "no NVLink": (
        changed(NODE, links={**PAIRS, ("GPU0", "GPU3"): "SYS"}),
        "GPU links",
        "warn",
        "1 of 28 pairs .*GPU0 and GPU3",
    ),
    "links unknown": (changed(NODE, links={}), "GPU links", "warn", "tells nothing"),
    "InfiniBand down": (
        changed(NODE, infiniband={"mlx5_0:1": "ACTIVE, 400 Gb/sec", "mlx5_1:1": "DOWN, 10 Gb/sec"}),
        "network",
        "warn",
        "mlx5_1:1 is DOWN",
    ),
    "interface missing": (environment(NODE, {}, NCCL_SOCKET_IFNAME="ib0"), "network", "bad", "NCCL_SOCKET_IFNAME is 'ib0'"),
    "interface by its start": (environment(NODE, {}, NCCL_SOCKET_IFNAME="eth"), "network", "ok", "eth0"),
    "gloo wants the whole name": (environment(NODE, {}, GLOO_SOCKET_IFNAME="eth"), "network", "bad", "GLOO_SOCKET_IFNAME is"),
    "interfaces left out": (environment(NODE, {}, NCCL_SOCKET_IFNAME="^docker"), "network", "ok", "eth0"),
    "no loopback": (changed(LAPTOP, loopback_problem="127.0.0.1 takes no connection"), "rendezvous", "bad", "no connection"),
    "host without a name": (changed(LAPTOP, host_problem="box has no address"), "rendezvous", "warn", "host's name box has no"),
    "rank alone": (environment(LAPTOP, {}, RANK="0"), "launcher", "warn", "RANK set, but not all"),
    "rank too high": (environment(NODE, TORCHRUN, RANK="16"), "launcher", "bad", "must be less than WORLD_SIZE = 16"),
    "rank no number": (environment(NODE, TORCHRUN, RANK="one"), "launcher", "bad", "RANK is 'one'"),
    "Slurm no number": (
        environment(NODE, {}, SLURM_PROCID="0", SLURM_NTASKS="many"),
        "launcher",
        "bad",
        "SLURM_NTASKS|variables of Slurm",
    ),
    "no address": (environment(NODE, TORCHRUN, MASTER_ADDR=None), "launcher", "bad", "MASTER_ADDR is not set"),
    "no port": (environment(NODE, TORCHRUN, MASTER_PORT=None), "launcher", "bad", "MASTER_PORT is not set"),
    "port too high": (environment(NODE, TORCHRUN, MASTER_PORT="99999"), "launcher", "bad", "from 1 to 65535"),
    "address unknown": (
        changed(environment(NODE, TORCHRUN), master_problem="node-7 has no address"),
        "launcher",
        "bad",
        "node-7 has no address",
    ),
    "local rank too high": (environment(NODE, TORCHRUN, LOCAL_RANK="8"), "launcher", "bad", "LOCAL_RANK 8 is not below"),
    "uneven hosts": (environment(NODE, TORCHRUN, LOCAL_WORLD_SIZE="7"), "launcher", "bad", "do not divide into hosts of 7"),
    "more processes than GPUs": (
        environment(changed(NODE, gpus=NODE.gpus[:4]), TORCHRUN),
        "launcher",
        "bad",
        "but there are 4 GPUs",
    ),
    "few open files": (changed(LAPTOP, open_files=256), "limits", "warn", "256 open files"),
    "little shared memory": (changed(NODE, shared_memory_bytes=64 * 2**20), "limits", "warn", "0.06 GiB"),
    "shared memory of a CPU": (changed(LAPTOP, shared_memory_bytes=64 * 2**20), "limits", "ok", "0.06 GiB"),
    "files without a limit": (changed(LAPTOP, open_files=-1), "limits", "ok", ""),
    "disk read-only": (changed(LAPTOP, disk=Disk("/x", 9e9, "/x cannot be written")), "disk", "bad", "cannot be written"),
    "disk full": (changed(LAPTOP, disk=Disk("/x", 1e8)), "disk", "warn", "0.1 GiB free"),
    "disk slow": (changed(LAPTOP, disk=Disk("/x", 1e12, write_bytes_s=5e6)), "disk", "warn", "at 5 MB/s: checkpoints"),
    "clock behind": (changed(LAPTOP, now_s=1.9e9 - 10 * 86_400), "clock", "warn", "10 days before"),
    "clocks apart": (changed(LAPTOP, disk=Disk("/x", 1e12, clock_ahead_s=-90.0)), "clock", "warn", "-90 s from this"),
}


@pytest.mark.parametrize("case", CASES)
def test_each_problem_is_found_without_false_positives(case: str) -> None:
    base, name, level, text = CASES[case]
    findings = machine_findings(base)
    one = found(findings, name)
    assert one.level == level
    assert re.search(text, one.text)
    assert bool(one.advice) == (level != "ok")
    assert [other.name for other in findings if other.level != "ok" and other.name != name] == []


def plan(cluster: str, model: str = "llama-3-8b", seq: int = 4096, **layout: Any) -> Plan:
    parallelism = Layout(**{"mbs": 1, "gas": 1, **layout})
    job = Job(
        model=Model.load(model),
        cluster=Cluster.load(cluster),
        seq=seq,
        batch_tokens=parallelism.batch_tokens(seq),
    )
    return Plan(job=job, layout=parallelism, estimate=estimate(job, parallelism))


EIGHT = plan("8xh100", dp=8, zero=3, recompute="full")


def test_a_plan_that_fits_the_machine() -> None:
    findings = plan_findings(EIGHT, NODE)
    assert [finding for finding in findings if finding.level != "ok"] == []
    # 8,030,261,248 parameters · (4 of the master + 8 of AdamW's moments) = 96,363,134,976 bytes = 89.75 GiB
    assert found(findings, "plan: checkpoints").text.startswith("one takes 89.75 GiB (12 bytes a parameter)")


def test_more_parts_than_gpus() -> None:
    one = found(plan_findings(plan("16xh100", dp=8, tp=2, zero=3), NODE), "plan: processes")
    assert one.level == "ok"  # two hosts of eight
    assert "torchrun --nnodes 2 --nproc-per-node 8" in one.text
    one = found(plan_findings(EIGHT, changed(NODE, gpus=NODE.gpus[:4])), "plan: processes")
    assert one.level == "bad"
    assert "layout.dp·tp·pp·cp is 8·1·1·1 = 8 but there are 4 GPUs here" in one.text
    assert one.advice.startswith("with 4 these work: dp4 ")
    assert ";" in one.advice


def test_a_launchers_processes_must_match() -> None:
    assert found(plan_findings(EIGHT, environment(NODE, TORCHRUN)), "plan: processes").level == "bad"
    eight = environment(NODE, TORCHRUN, WORLD_SIZE="8", RANK="1")
    assert found(plan_findings(EIGHT, eight), "plan: processes").level == "ok"


def test_fewer_parts_than_gpus() -> None:
    assert found(plan_findings(plan("4xh100", dp=4, zero=3, recompute="full"), NODE), "plan: processes").level == "ok"


def test_another_gpu() -> None:
    v100 = changed(NODE, gpus=tuple(replace(gpu, name="Tesla V100-SXM2-32GB", memory_bytes=32 * GIB) for gpu in NODE.gpus))
    findings = plan_findings(EIGHT, v100)
    assert found(findings, "plan: device").level == "warn"
    assert found(findings, "plan: device").advice == "plan anew with --cluster 8xv100"
    assert found(findings, "plan: precision").level == "bad"
    assert "v100 does not compute in bf16" in found(findings, "plan: precision").text
    unknown = changed(NODE, gpus=tuple(replace(gpu, name="NVIDIA L40") for gpu in NODE.gpus))
    assert found(plan_findings(EIGHT, unknown), "plan: device").level == "warn"


def test_too_little_memory_and_memory_in_use() -> None:
    peak = EIGHT.estimate.peak_gib * GIB
    small = changed(NODE, gpus=tuple(replace(gpu, memory_bytes=0.9 * peak, free_bytes=0.9 * peak) for gpu in NODE.gpus))
    one = found(plan_findings(EIGHT, small), "plan: memory")
    assert (one.level, "--objective memory" in one.advice) == ("bad", True)
    taken = changed(NODE, gpus=(*NODE.gpus[:7], replace(GPU, index="7", free_bytes=0.9 * peak)))
    one = found(plan_findings(EIGHT, taken), "plan: memory")
    assert (one.level, "GPU 7 has" in one.text, "nvidia-smi" in one.advice) == ("bad", True, True)


def test_a_gpus_plan_on_a_cpu() -> None:
    tiny = plan("2xh100", model="tiny", seq=128, dp=2)
    levels = {finding.name: finding.level for finding in plan_findings(tiny, LAPTOP)}
    assert levels["plan: device"] == levels["plan: precision"] == "warn"
    assert levels["plan: processes"] == levels["plan: checkpoints"] == "ok"
    broken = changed(LAPTOP, gpu_problem="nvidia-smi: no driver")
    assert found(plan_findings(tiny, broken), "plan: device").level == "bad"
    assert found(plan_findings(tiny, changed(LAPTOP, cores=1)), "plan: processes").level == "warn"
    two = 2 * tiny.estimate.peak_gib * GIB
    assert found(plan_findings(tiny, changed(LAPTOP, free_memory_bytes=two * 1.01)), "plan: memory").level == "ok"
    assert found(plan_findings(tiny, changed(LAPTOP, free_memory_bytes=two * 0.99)), "plan: memory").level == "bad"


@pytest.mark.parametrize(("checkpoints_that_fit", "level"), [(0.9, "bad"), (3.9, "warn"), (4.1, "ok")])
def test_checkpoints_and_the_disk(checkpoints_that_fit: float, level: str) -> None:
    free = checkpoints_that_fit * 12 * EIGHT.job.model.parameters
    facts = changed(NODE, disk=Disk("/x", free))
    assert found(plan_findings(EIGHT, facts), "plan: checkpoints").level == level


def test_checkpoints_of_another_optimizer_take_other_bytes() -> None:
    plain = EIGHT.model_copy(update={"job": EIGHT.job.changed(optimizer="sgd")})
    assert "(4 bytes a parameter)" in found(plan_findings(plain, NODE), "plan: checkpoints").text


def test_plans_the_engine_does_not_support() -> None:
    other = EIGHT.model_copy(update={"job": EIGHT.job.changed(attention="plain")})
    one = found(plan_findings(other, NODE), "plan: engine")
    assert (one.level, "job.attention is plain" in one.text) == ("bad", True)


def test_a_stale_plan() -> None:
    old = EIGHT.model_copy(update={"estimate": EIGHT.estimate.model_copy(update={"peak_gib": 30.0})})
    one = found(plan_findings(old, NODE), "plan: estimate")
    assert (one.level, "says a peak of 30 GiB" in one.text) == ("warn", True)


def test_a_plan_read_from_its_file_is_not_stale(tmp_path: Path) -> None:
    read = Plan.load(EIGHT.save(tmp_path / "plan.yaml"))
    assert found(plan_findings(read, NODE), "plan: estimate").level == "ok"


SMI = """0, GPU-aaaa, NVIDIA H100 80GB HBM3, 570.86.10, 81559, 81000
1, GPU-bbbb, NVIDIA H100 80GB HBM3, 570.86.10, 81559, [N/A]
"""


def test_nvidia_smis_answer() -> None:
    first, second = nvidia.parse_gpus(SMI)
    assert first == GPUFact("0", H100, "570.86.10", 81559 * 2**20, 81000 * 2**20)
    assert second.free_bytes == 0
    assert [gpu.index for gpu in nvidia.parse_gpus(SMI, "1")] == ["1"]
    assert [gpu.index for gpu in nvidia.parse_gpus(SMI, "GPU-bb")] == ["1"]
    assert nvidia.parse_gpus(SMI, "") == nvidia.parse_gpus("No devices were found\n") == ()


@pytest.mark.parametrize(
    ("script", "gpus", "problem"),
    [
        (f"cat <<END\n{SMI}END", 2, ""),
        ("echo 'No devices were found'; exit 6", 0, ""),
        ("echo 'Driver/library version mismatch' >&2; exit 18", 0, "nvidia-smi: Driver/library version mismatch"),
        ("exit 3", 0, "nvidia-smi: exit code 3"),
        ("sleep 5", 0, "nvidia-smi did not answer"),
    ],
)
def test_calling_nvidia_smi(script: str, gpus: int, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(nvidia, "ASK_S", 1.0)
    answer, message = nvidia.ask_gpus(None)
    assert (len(answer), message.startswith(problem), bool(message)) == (gpus, True, bool(problem))


TOPO = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-47\n"
    "GPU1\tNV18\t X \tPHB\tSYS\t0-47\n"
    "GPU2\tSYS\tPHB\t X \tSYS\t48-95\n"
    "NIC0\tPIX\tSYS\tSYS\t X \n\nLegend:\n  X    = Self\n"
)


def test_the_links_of_nvidia_smi() -> None:
    assert nvidia.parse_links(TOPO) == {("GPU0", "GPU1"): "NV18", ("GPU0", "GPU2"): "SYS", ("GPU1", "GPU2"): "PHB"}
    assert nvidia.parse_links("") == {}


def test_facts_from_the_kernel(tmp_path: Path) -> None:
    port = tmp_path / "ib" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert facts.infiniband(tmp_path / "ib") == {"mlx5_0:1": "ACTIVE, 400 Gb/sec (4X NDR)"}
    assert facts.infiniband(tmp_path / "none") == {}
    for name, state in {"lo": "unknown", "eth0": "up", "eth1": "down"}.items():
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "operstate").write_text(state)
    assert facts.interfaces(tmp_path / "net") == ("eth0", "lo")


def test_a_name_without_an_address() -> None:
    assert facts.resolves("localhost") == ""
    assert "no-such-host.invalid" in facts.resolves("no-such-host.invalid")


def test_the_disk_check_leaves_no_files(tmp_path: Path) -> None:
    found_disk = facts.try_disk(tmp_path / "runs" / "first")
    assert (found_disk.place, found_disk.problem) == (str(tmp_path), "")
    assert found_disk.write_bytes_s is not None
    assert found_disk.write_bytes_s > 0
    assert not list(tmp_path.iterdir())


def test_an_unwritable_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert "cannot be written (no space left on device)" in facts.try_disk(tmp_path).problem
    assert not list(tmp_path.iterdir())


def test_this_machine(tmp_path: Path) -> None:
    messages: list[str] = []
    findings = machine_findings(facts.gather(tmp_path, messages.append))
    assert len(findings) == len(doctor.MACHINE_CHECKS)
    assert len(messages) == 4
    assert found(findings, "torch").level == "ok"


def shown(findings: list[Finding], plan_name: str | None) -> str:
    console = Console(file=StringIO(), width=120, markup=False)
    show.show_findings(console, findings, plan_name)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_what_is_printed() -> None:
    good = shown(machine_findings(LAPTOP), None)
    assert "nothing stops a run here" in good
    findings = [Finding("disk", "bad", "[red] is no markup", "make room"), Finding("clock", "warn", "late", "set it")]
    text = shown(findings, "plan.yaml")
    assert "[red] is no markup" in text
    assert "disk: make room" in text
    assert "plan.yaml would not run here: disk" in text
    assert "(1 warning)" in shown(findings[1:], None)


@pytest.mark.parametrize("torch", [None, "2.13.0"])
def test_the_same_as_json(torch: str | None, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "gather", lambda *_: packages(LAPTOP, torch=torch))
    code, out, _ = run("doctor", "--json")
    data = json.loads(out)
    assert (data["plan"], data["stopped"], code) == (None, torch is None, 1 if torch is None else 0)
    assert {"name", "level", "text", "advice"} == set(data["findings"][0])
