"""DeepSpeed really trains from the exported file: two processes on gloo, the small model as a Hugging Face config."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_builders import exported, planned

from ultrascale.specs.cluster import Cluster
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

# fields of the job, fields of the layout
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ZeRO-0": ({}, {"dp": 2}),
    "ZeRO-1": ({}, {"dp": 2, "zero": 1}),
    "ZeRO-2": ({"gradients": "bf16"}, {"dp": 2, "zero": 2}),
    "ZeRO-3": ({}, {"dp": 2, "zero": 3}),
    "fp32": ({"precision": "fp32"}, {"dp": 2, "zero": 2}),
    "fp16": ({"precision": "fp16"}, {"dp": 2}),
    "momentum": ({"optimizer": "sgd-momentum"}, {"dp": 2, "zero": 1}),
    "tensors": ({}, {"tp": 2, "zero": 1}),
    "muon": ({"optimizer": "muon"}, {"dp": 2, "zero": 3}),
}


def written(name: str, folder: Path) -> Path:
    job_fields, layout_fields = RUNS[name]
    gas = 2 * 2 // layout_fields.get("dp", 1)
    job = Job(model=Model.load("tiny"), cluster=Cluster.load("2xh100"), seq=32, batch_tokens=32 * 8, **job_fields)
    return exported(planned(job, Layout(mbs=2, gas=gas, **layout_fields)), "deepspeed", folder)


def test_the_file_has_what_its_engine_starts_with(tmp_path: Path) -> None:
    """Its parser passes over these; the engine ends without them."""
    found = {name: json.loads((written(name, tmp_path / name) / "ds_config.json").read_text()) for name in RUNS}
    formats = {name: one["data_types"]["grad_accum_dtype"] for name, one in found.items()}
    assert [formats[name] for name in ("ZeRO-0", "fp16", "ZeRO-1", "ZeRO-2")] == ["bf16", "fp16", "fp32", "bf16"]
    assert [name for name, one in found.items() if "zero_allow_untested_optimizer" in one] == ["momentum"]
    assert [name for name, one in found.items() if "train_batch_size" not in one] == ["tensors"]
    assert [name for name, one in found.items() if "reduce_scatter" in one["zero_optimization"]] == ["muon"]


@pytest.mark.slow
def test_it_trains_with_every_stage_and_number_format(tmp_path: Path) -> None:
    left_out = {"muon"}  # its steps are compiled for minutes
    if not torch.ops.mkldnn._is_mkldnn_fp16_supported():  # as DeepSpeed asks a CPU
        left_out.add("fp16")
    names = [name for name in RUNS if name not in left_out]
    folders = [written(name, tmp_path / name) for name in names]
    program = Path(__file__).with_name("deepspeed_run.py")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program, *folders]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"optimizer"')]
    found = dict(zip(names, answers, strict=True))
    for name, answer in found.items():
        layout = RUNS[name][1]
        assert (answer["stage"], answer["tensor_ranks"]) == (layout.get("zero", 0), layout.get("tp", 1)), name
        assert answer["steps"] == 3, name
        assert answer["losses"] == sorted(answer["losses"], reverse=True), name
    for name in ("ZeRO-2", "ZeRO-3", "fp32"):  # the same data and weights: one curve, within what bf16 leaves
        assert found[name]["losses"] == pytest.approx(found["ZeRO-1"]["losses"], rel=2e-3), name
    assert found["tensors"]["held"] < found["ZeRO-1"]["held"]
