"""Plans for each engine, exported, stripped of comments and imported: the same step time and memory, or a named reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from builders import make_job
from ultrascale.export import targets, write
from ultrascale.export.check import CLOSE
from ultrascale.export.common import OWN_KEY, EngineFormat
from ultrascale.export.header import KEPT
from ultrascale.export.read import ImportOptions, plan_from
from ultrascale.plan import plan as search
from ultrascale.specs.framework import Framework
from ultrascale.specs.plan import Plan

# model, cluster, sequence, sequences in a batch, precision
JOBS = [
    ("llama-3.2-1b", "8xh100", 8192, 64, "bf16"),
    ("llama-3.2-3b", "8xh200", 4096, 128, "bf16"),
    ("llama-3-8b", "8xh100", 8192, 64, "bf16"),
    ("llama-3-8b", "16xh100", 8192, 128, "bf16"),
    ("llama-3-8b", "8xb200", 8192, 64, "fp8"),
    ("llama-3.1-8b", "32xh100", 32768, 32, "bf16"),
    ("llama-3-70b", "64xh100", 8192, 512, "bf16"),
    ("llama-3.1-70b", "128xb200", 8192, 512, "bf16"),
    ("llama-3.1-405b", "512xh200", 8192, 1024, "bf16"),
    ("llama-2-7b", "16xa100", 4096, 256, "bf16"),
    ("llama-2-13b", "32xa100", 4096, 256, "bf16"),
    ("qwen3-1.7b", "8xh100", 4096, 128, "bf16"),
    ("qwen3-8b", "8xh200", 4096, 128, "bf16"),
    ("qwen3-14b", "16xb200", 8192, 64, "bf16"),
    ("qwen3-32b", "32xh100", 4096, 256, "bf16"),
    ("qwen3-30b-a3b", "32xh100", 4096, 256, "bf16"),
    ("mixtral-8x7b", "32xh100", 4096, 256, "bf16"),
    ("deepseek-v2-lite", "16xh100", 4096, 128, "bf16"),
    ("smollm-1.7b", "8xa100", 2048, 256, "bf16"),
    ("gpt2", "8xa100", 1024, 512, "bf16"),
]
CASES = [(engine, job) for engine in targets.ENGINES for job in JOBS]


def planned(engine: str, job: tuple[str, str, int, int, str]) -> Plan | None:
    """The first layout of a small search, None where nothing fits."""
    model, cluster, seq, sequences, precision = job
    framework = Framework.load(targets.ENGINES[engine][0].framework)
    if framework.name in ("nanotron", "deepspeed") and precision == "fp8":
        precision = "bf16"
    found = search(
        make_job(model, cluster, seq, sequences, framework=framework.name, precision=precision), top=1, explain=False
    )
    return found.plans[0] if found.plans else None


def without_comments(engine: EngineFormat, text: str) -> str:
    """Settings alone; of what the user's program sets, in files of DeepSpeed and Accelerate, the lines that say it stay."""
    if engine.config.endswith(".json"):
        data = json.loads(text)
        data[OWN_KEY] = [line for line in data[OWN_KEY] if line.startswith(KEPT) and _program(engine, line)]
        return json.dumps(data)
    lines = text.splitlines()
    return "\n".join(line for line in lines if not line.startswith("# ") or (KEPT in line and _program(engine, line)))


def _program(engine: EngineFormat, line: str) -> bool:
    return line.partition(f"{KEPT}: ")[2].partition(" = ")[0] in engine.program


@pytest.mark.quick_cases("megatron-llama-3-8b on 8xh100", "torchtitan-qwen3-8b on 8xh200", "accelerate-gpt2 on 8xa100")
@pytest.mark.parametrize(("to", "job"), CASES, ids=[f"{to}-{job[0]} on {job[1]}" for to, job in CASES])
def test_a_planned_layout_comes_back_or_is_refused(to: str, job: tuple[str, str, int, int, str], tmp_path: Path) -> None:
    plan = planned(to, job)
    if plan is None:
        pytest.skip(f"nothing fits on {job[1]} in {to}")
    exported = targets.engine_files(plan, to, None, "out")
    if not exported.same:
        for check in exported.checks:
            assert check.differences
            assert all(one.why for one in check.differences)
        return
    write.into(tmp_path, exported.files, force=False)
    for engine in (check.engine for check in exported.checks):
        file = tmp_path / engine.config
        file.write_text(without_comments(engine, file.read_text()))
        found = plan_from(file, ImportOptions(cluster=plan.job.cluster)).plan
        assert found.estimate.step_time_s == pytest.approx(plan.estimate.step_time_s, rel=CLOSE)
        assert found.estimate.peak_gib == pytest.approx(plan.estimate.peak_gib, rel=CLOSE)
