"""`ultrascale export` and `ultrascale import`: files, sentences, exit codes; and every bad input in one sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import samples
from plan_builders import exported, plan_of, planned

from builders import make_job
from ultrascale.cost.estimate import estimate
from ultrascale.specs.framework import Framework
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import Plan


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return plan_of("dense").save("plan.yaml")


def refused(answer: tuple[int, str, str], *says: str) -> None:
    code, out, err = answer
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    for words in says:
        assert words in err


def test_export_prints_written_files_and_the_next_command(run, plan: Path) -> None:
    code, out, _ = run("export", plan, "--to", "megatron", "-o", "out")
    assert code == 0
    assert "Wrote out/run.sh" in out
    assert "Next: MEGATRON_LM=/path/to/Megatron-LM bash out/run.sh" in out
    assert os.access("out/run.sh", os.X_OK)


def test_export_and_import_in_json(run, plan: Path) -> None:
    code, out, _ = run("export", plan, "--to", "megatron", "-o", "out", "--json")
    assert code == 0
    answer = json.loads(out)
    assert answer["written"] == ["out/run.sh"]
    (check,) = answer["checks"]
    assert check["same"]
    assert check["actual"] == check["planned"]
    code, out, _ = run("import", "out/run.sh", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["engine"] == "megatron"
    back = Plan.from_mapping(found["plan"])
    assert back.layout == plan_of("dense").layout
    assert back.job.framework.name == "megatron-core"
    assert back.estimate.step_time_s == pytest.approx(check["actual"]["step_time_s"])


def test_an_engine_that_cannot_run_the_plan_gets_no_file(run, plan: Path) -> None:
    code, out, _ = run("export", plan, "--to", "nanotron", "-o", "out")
    assert code == 1
    assert "differs: nanotron runs it in" in out
    assert "layout.schedule: 1f1b instead of interleaved (nanotron has afab and 1f1b)" in " ".join(out.split())
    assert "plan with --framework nanotron" in out
    assert not os.path.exists("out")
    code, out, _ = run("export", plan, "--to", "nanotron", "-o", "out", "--allow-different", "--json")
    assert code == 0
    answer = json.loads(out)
    assert any(line.startswith("not expressible here: layout.schedule = interleaved") for line in answer["header"])
    assert {"layout.schedule", "layout.virtual_stages"} == {one["field"] for one in answer["checks"][0]["differences"]}
    _, out, _ = run("import", "out/config.yaml", "--json")
    assert json.loads(out)["plan"]["layout"]["schedule"] == "1f1b"


def test_a_plan_that_fits_only_in_our_engine_gets_no_file(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = make_job("llama-3-70b", "64xh100", 8192, 512)
    job = job.changed(framework=Framework.own("h100"))
    planned(job, Layout(dp=64, zero=3, mbs=2, gas=4, recompute="full")).save("plan.yaml")
    code, out, _ = run("export", "plan.yaml", "--to", "accelerate", "-o", "out")
    assert code == 1
    assert "does not fit: there are 79.1 GiB; in ultrascale it needs 52" in out
    assert not os.path.exists("out")
    assert run("export", "plan.yaml", "--to", "accelerate", "-o", "out", "--allow-different")[0] == 0


def test_an_imported_file_is_a_reason(run, plan: Path) -> None:
    run("export", plan, "--to", "megatron", "-o", "out")
    code, out, _ = run("import", "out/run.sh")
    assert code == 0
    assert "  • read from run.sh, a file for Megatron-LM" in out
    assert "•\n" not in "\n".join(line.rstrip() for line in out.splitlines())


def test_an_engine_is_exported_with_a_launcher(run, plan: Path) -> None:
    code, out, _ = run("export", plan, "--to", "megatron", "--launcher", "slurm", "-o", "out")
    assert code == 0
    assert sorted(os.listdir("out")) == ["job.sbatch", "node.sh", "run.sh"]
    assert "Next: cd out && sbatch job.sbatch" in out
    code, out, _ = run("export", plan, "--to", "nanotron", "--launcher", "slurm", "-o", "other")
    assert code == 1
    assert not os.path.exists("other")


def test_import_prints_what_explain_prints_and_writes_a_plan(run, plan: Path) -> None:
    run("export", plan, "--to", "torchtitan", "-o", "out", "--allow-different")
    assert sorted(os.listdir("out")) == ["config.toml", "ultrascale_config.py"]
    code, out, _ = run("import", "out/config.toml", "-o", "back.yaml")
    assert code == 0
    for words in ("A file for torchtitan", "Memory at the peak", "Time of one step", "back.yaml"):
        assert words in out
    assert "would run it" not in out
    back = Plan.load("back.yaml")
    assert (back.job.framework.name, back.layout.zero, back.layout.keep_gathered) == ("torchtitan", 3, True)
    assert run("explain", "back.yaml")[0] == 0
    assert "As torchtitan would run it" in run("import", "out/config.toml", "--framework", "playbook")[1]


def test_style_selects_the_torchtitan_version(run, plan: Path) -> None:
    assert run("export", plan, "--to", "torchtitan", "--style", "toml", "-o", "a", "--allow-different")[0] == 0
    assert os.listdir("a") == ["config.toml"]
    assert run("export", plan, "--to", "torchtitan", "--style", "current", "-o", "b", "--allow-different")[0] == 0
    assert os.listdir("b") == ["ultrascale_config.py"]


def test_of_two_formats_the_one_that_runs_the_plan_is_written(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan 0.2 has no 1B model, 0.3 has."""
    monkeypatch.chdir(tmp_path)
    job = make_job("llama-3.2-1b", "8xh100", 4096, 64, framework="torchtitan")
    planned(job, Layout(dp=8, zero=3, mbs=4, gas=2)).save("plan.yaml")
    code, out, _ = run("export", "plan.yaml", "--to", "torchtitan", "-o", "out")
    assert code == 0
    assert "as planned: torchtitan 0.3" in out
    assert os.listdir("out") == ["ultrascale_config.py"]


def test_a_misspelled_setting_with_a_default_is_noted(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = exported(plan_of("sharded"), "deepspeed", Path("out")) / "ds_config.json"
    file.write_text(file.read_text().replace('"stage"', '"stge"'))
    code, out, _ = run("import", file)
    assert code == 0
    assert "not read: zero_optimization.stge: did you mean" in out


def test_a_non_empty_folder_is_not_overwritten(run, plan: Path) -> None:
    os.mkdir("out")
    Path("out/mine.txt").write_text("mine")
    refused(run("export", plan, "--to", "slurm", "-o", "out"), "mine.txt is in the way", "--force")
    assert os.listdir("out") == ["mine.txt"]
    assert run("export", plan, "--to", "slurm", "-o", "out", "--force")[0] == 0
    assert sorted(os.listdir("out")) == ["job.sbatch", "mine.txt", "plan.yaml"]


EXPORTS = [
    (["--to", "megatrn"], ["--to is 'megatrn'", "did you mean 'megatron'"]),
    (["--to", ""], ["--to is ''", "torchtitan"]),
    (["--to", "slurm", "--style", "toml"], ["--style is for torchtitan"]),
    (["--to", "torchtitan", "--style", "tml"], ["--style is 'tml'", "did you mean 'toml'?"]),
    (["--to", "slurm", "--image", "mine:1"], ["--image is for launchers of containers (kubernetes, skypilot, dstack)"]),
    (["--to", "megatron", "--image", "mine:1"], ["--image is for launchers of containers", "megatron starts none"]),
    (["--to", "slurm", "--launcher", "ray"], ["--launcher is for another engine's files; --to slurm starts ours"]),
    (["--to", "megatron", "--launcher", "slrm"], ["--launcher is 'slrm'", "did you mean 'slurm'?"]),
    (["--to", "dstack", "--image", 'a"b'], ["--image is", "container image"]),
    (["--to", "kubernetes", "--image", ""], ["--image is ''", "container image"]),
    (["--to", "kubernetes", "--image", "a b"], ["--image is 'a b'", "container image"]),
]


@pytest.mark.parametrize(("words", "says"), EXPORTS, ids=[" ".join(words) for words, _ in EXPORTS])
def test_an_impossible_export_is_refused(run, plan: Path, words: list[str], says: list[str]) -> None:
    refused(run("export", plan, *words, "-o", "out"), *says)
    assert not os.path.exists("out")


def test_unusable_folders_and_plans_are_refused(run, plan: Path) -> None:
    refused(run("export", "none.yaml", "--to", "slurm", "-o", "out"), "plan file none.yaml does not exist")
    refused(run("export", plan, "--to", "slurm", "-o", "plan.yaml"), "is a file: name a folder")
    refused(run("export", plan, "--to", "slurm", "-o", "plan.yaml/x"), "-o is plan.yaml/x, which cannot be made", "such as out")
    edited = plan.read_text().replace("  tp: 8\n", "  tp: 3\n")
    Path("edited.yaml").write_text(edited)
    refused(run("export", "edited.yaml", "--to", "megatron", "-o", "out"), "layout.dp·tp·pp·cp")
    latent = plan_of("latent").save("latent.yaml")
    refused(
        run("export", latent, "--to", "slurm", "-o", "out"), "layout.ep is 32 but the engine spreads experts over data ranks"
    )
    assert run("export", latent, "--to", "megatron", "-o", "out")[0] == 0


def test_adapters_are_not_lost_in_an_export(run, plan: Path) -> None:
    kept = Plan.load(plan)
    job = kept.job.changed(adapter_rank=16, framework=Framework.load("ultrascale"))
    adapters = Plan(job=job, layout=kept.layout, estimate=estimate(job, kept.layout)).save("adapters.yaml")
    code, out, err = run("export", adapters, "--to", "megatron", "-o", "out")
    assert code
    assert "job.adapter_rank: None instead of 16" in out + err
    assert not os.path.exists("out")


BOMB = "".join(f"a{n}: &a{n} {{{', '.join(f'k{i}: *a{n - 1}' for i in range(9))}}}\n" for n in range(1, 16))
BOMB = "parallelism: {dp: 1}\na0: &a0 {x: 1}\n" + BOMB

TEXTS = [
    ("empty.sh", b"", ["empty.sh is empty"]),
    ("space.toml", b" \n\t\n", ["is empty"]),
    ("binary.json", b"\x80\x81\xff\x00", ["is not text"]),
    ("large.yaml", b"# " + b"x" * (2**20 + 10), ["more than 1,048,576 bytes"]),
    ("broken.toml", b"[a]\nb = = 2\n", ["broken.toml is not TOML", "line 2"]),
    ("broken.json", b'{"a": 1,\n"b": }', ["broken.json is not JSON", "line 2"]),
    ("twice.json", b'{"a": 1, "a": 2}', ["the field 'a' is given twice"]),
    ("broken.yaml", b"a: 1\nb: [2\n", ["broken.yaml is not YAML", "line 3"]),
    ("broken.py", b"def f(:\n  pass", ["broken.py is not Python", "line 1"]),
    ("other.py", b"print(1)\n", ["other.py holds no configuration of torchtitan"]),
    ("other.sh", b"#!/bin/sh\necho hello\n", ["starts no training of Megatron-LM"]),
    ("quote.sh", b"echo a\necho 'b\n", ["quote.sh is not a shell script", "line 2"]),
    ("other.yaml", b"a: 1\nb: 2\n", ["YAML of no engine that is known (it has a, b)"]),
    ("list.yaml", b"- 1\n", ["is a list"]),
    ("python.yaml", b"!!python/object/apply:os.system [exit]", ["is not YAML"]),
    ("deep.json", b"[" * 100000, ["nested too deeply"]),
    ("deep.toml", b"a = " + b"[" * 5000, ["deep.toml"]),
    ("bomb.yaml", BOMB.encode(), ["more than 10,000 settings"]),
    ("chain.py", b"a" + b".a" * 20000 + b"()\n", ["chain.py"]),
    ("name.txt", b"a", ["ends in '.txt'"]),
    ("ours.sh", b"#!/bin/sh\ntorchrun -m ultrascale train plan.yaml\n", ["starts ultrascale itself", "plan.yaml"]),
    ("short.toml", b"[training]\nseq_len = 'long'\n", ["training.seq_len is 'long'", "whole number"]),
    ("nodp.yaml", b"parallelism: {tp: 2}\n", ["parallelism.dp is missing"]),
    ("wrong.yaml", b"parallelism: 3\ntokens: [1]\n", ["parallelism.dp is missing"]),
]


@pytest.mark.parametrize(("name", "text", "says"), TEXTS, ids=[name for name, _, _ in TEXTS])
def test_unreadable_files_are_refused(run, plan: Path, name: str, text: bytes, says: list[str]) -> None:
    Path(name).write_bytes(text)
    refused(run("import", name, "--cluster", "8xh100"), *says)


def test_paths_that_are_not_files_are_refused(run, plan: Path) -> None:
    refused(run("import", "none.sh"), "none.sh does not exist: name a run.sh")
    refused(run("import", "."), ". is a folder: name a file in it")
    refused(run("import", plan), "is a plan already", "ultrascale explain")
    Path("run.sh").write_text(samples.MEGATRON)
    refused(run("import", "run.sh", "--cluster", "12xh100"), "cluster is '12xh100'")
    refused(run("import", "run.sh", "--model", "lama-3-8b"), "did you mean")
    refused(run("import", "run.sh", "--seq", "long"), "--seq is 'long'")
    refused(run("import", "run.sh", "--framework", "megatron"), "framework 'megatron' is not known")


SLIPS = [
    ("megatron", "run.sh", "--num-layers", "--num-layres", ["--num-layers is missing (there is '--num-layres')"]),
    ("accelerate", "config.yaml", "num_processes", "num_proceses", ["but there are 1 data ranks (there is 'num_proceses')"]),
]


@pytest.mark.parametrize(("to", "name", "right", "wrong", "says"), SLIPS, ids=[slip[0] for slip in SLIPS])
def test_a_misspelled_setting_is_named_where_its_value_is_missing(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, name: str, right: str, wrong: str, says: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = exported(plan_of("sharded"), to, Path("out")) / name
    file.write_text(file.read_text().replace(right, wrong))
    refused(run("import", file), *says)


@pytest.mark.slow
def test_a_report_is_a_file(run, plan: Path) -> None:
    pytest.importorskip("plotly")
    os.mkdir("folder")
    refused(run("report", plan, "-o", "folder"), "folder is a folder: name a file in it, such as folder/report.html")


def test_help_names_every_target(run) -> None:
    code, out, _ = run("export", "--help")
    assert code == 0
    words = (
        "torchtitan",
        "megatron",
        "nanotron",
        "deepspeed",
        "accelerate",
        "slurm",
        "kubernetes",
        "skypilot",
        "dstack",
        "ray",
    )
    assert all(word in out for word in words)
    code, out, _ = run("import", "--help")
    assert "never run" in out
