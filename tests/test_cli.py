"""The commands of the command line do what they say, for people and for machines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from ultrascale import Plan, __version__, estimate
from ultrascale.cli.common import app
from ultrascale.launch.launcher import has_gpu

Run = Callable[..., tuple[int, str, str]]
JOB = ["llama-3-8b", "--cluster", "8xh100", "--batch-tokens", "1M", "--seq", "8192"]
SMALL = ["llama-3.2-1b", "--cluster", "8xh100", "--batch-tokens", "256k", "--seq", "4096"]


@pytest.fixture
def plan_file(run: Run, tmp_path: Path) -> Path:
    code, _, _ = run("plan", *SMALL, "--fix", "pp=2", "-o", tmp_path / "plan.yaml")
    assert code == 0
    return tmp_path / "plan.yaml"


def planned(run: Run, *arguments: object) -> dict[str, Any]:
    code, out, err = run("plan", *arguments, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize(("model", "seq"), [("llama-3.2-1b", 8192), ("gpt2", 1024)])
def test_plan_has_a_batch_and_a_sequence_by_default(run: Run, model: str, seq: int) -> None:
    found = planned(run, model, "--cluster", "8xh100", "--top", 1)
    layout = found["plans"][0]["layout"]
    assert layout["dp"] * layout["mbs"] * layout["gas"] * seq == 4 * 2**20


def test_plan_prints_the_json_that_scripts_rely_on(run: Run) -> None:
    found = planned(run, *JOB, "--top", 3)
    assert isinstance(found["evaluated"], int)
    assert found["evaluated"] > 10_000
    assert isinstance(found["seconds"], float)
    assert len(found["plans"]) == 3
    for one in found["plans"]:
        assert {"dp", "tp", "pp", "cp", "ep", "zero", "schedule", "mbs", "gas", "recompute"} <= one["layout"].keys()
        assert all(one["estimate"][name] > 0 for name in ("step_time_s", "tokens_per_s_per_gpu", "mfu", "hfu", "peak_gib"))
        assert one["estimate"]["peak_gib"] <= one["estimate"]["capacity_gib"]
        assert one["reasons"]
        assert all(isinstance(reason, str) for reason in one["reasons"])
    times = [one["estimate"]["step_time_s"] for one in found["plans"]]
    assert times == sorted(times)


@pytest.mark.parametrize("objective", ["throughput", "cost", "memory"])
def test_files_of_model_and_cluster_and_each_objective(run: Run, tmp_path: Path, objective: str) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "num_hidden_layers": 16,
                "hidden_size": 2048,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "intermediate_size": 8192,
                "vocab_size": 128256,
            }
        )
    )
    (tmp_path / "cluster.yaml").write_text("gpu: h100\nnodes: 1\ngpus_per_node: 8\nnetwork_gb_s: 25\n")
    common = ["--batch-tokens", "1M", "--seq", 4096, "--top", 20, "--objective", objective]
    found = planned(run, tmp_path / "config.json", "--cluster", tmp_path / "cluster.yaml", *common)
    assert len(found["plans"]) == 20
    estimates = [one["estimate"] for one in found["plans"]]
    best = {
        "throughput": lambda e: e["step_time_s"],
        "memory": lambda e: e["peak_gib"],
        "cost": lambda e: -e["tokens_per_s_per_gpu"],
    }[objective]
    assert [best(e) for e in estimates] == sorted(best(e) for e in estimates)


@pytest.mark.quick_cases(every=4)
@pytest.mark.parametrize(
    "constraint",
    ["tp=2", "zero=3", "recompute=full", "mbs=2,gas=8", "pp=2,schedule=1f1b", "pp=4,schedule=interleaved", "cp=2", "dp=1"],
)
def test_fixed_fields_hold_in_every_plan(run: Run, constraint: str) -> None:
    for one in planned(run, *SMALL, "--top", 20, "--fix", constraint)["plans"]:
        for name, value in (pair.split("=") for pair in constraint.split(",")):
            assert str(one["layout"][name]) == value


@pytest.mark.quick_cases(every=3)
@pytest.mark.parametrize(
    ("constraint", "field", "forbidden"),
    [
        ("tp", "tp", [2, 4, 8]),
        ("zero=1", "zero", [1]),
        ("cp", "cp", [2, 4, 8]),
        ("recompute=full", "recompute", ["full"]),
        ("pp=2,pp=4", "pp", [2, 4]),
        ("dp=8", "dp", [8]),
    ],
)
def test_forbidden_values_are_in_no_plan(run: Run, constraint: str, field: str, forbidden: list[Any]) -> None:
    for one in planned(run, *SMALL, "--top", 20, "--forbid", constraint)["plans"]:
        assert one["layout"][field] not in forbidden


def test_a_plan_for_people_fits_in_150_columns(run: Run, tmp_path: Path) -> None:
    code, out, err = run("plan", *JOB, "--top", 5, "--total-tokens", "15T", "-o", tmp_path / "p.yaml")
    assert (code, err) == (0, "")
    assert "8 × h100 (1 node of 8)" in out
    assert "15 T tokens in total" in out
    assert "Whole training: " in out
    assert "Why the first one" in out
    assert f"Wrote {tmp_path / 'p.yaml'}" in out.replace("\n", "")
    assert max(map(len, out.splitlines())) <= 150
    assert "…" not in out


def test_the_written_plan_reads_back_and_predicts_the_same(run: Run, tmp_path: Path) -> None:
    found = planned(run, *SMALL, "--top", 1, "-o", tmp_path / "plan.yaml")["plans"][0]
    again = Plan.load(tmp_path / "plan.yaml")
    assert again.layout.model_dump(mode="json") == found["layout"]
    predicted = estimate(again.job, again.layout)
    for name in ("step_time_s", "peak_gib", "mfu", "hfu", "tokens_per_s_per_gpu"):
        assert getattr(predicted, name) == pytest.approx(found["estimate"][name], rel=1e-12)
        assert getattr(again.estimate, name) == pytest.approx(found["estimate"][name], rel=1e-5)


def test_when_nothing_fits_the_missing_memory_and_advice_are_printed(run: Run, tmp_path: Path) -> None:
    job = ["llama-3-70b", "--cluster", "8xh100", "--batch-tokens", "64k", "--seq", "8192"]
    output = tmp_path / "plan.yaml"
    code, out, _ = run("plan", *job, "-o", output)
    flat = " ".join(out.split())
    assert code == 1
    assert "Nothing fits. The closest layout, " in flat
    assert "GiB too much." in flat
    assert "What makes it fit, cheapest first:" in flat
    assert "--cluster " in flat
    assert "was not written: there is no plan to write" in flat
    assert not output.exists()
    code, out, _ = run("plan", *job, "--json")
    found = json.loads(out)
    assert (code, found["plans"]) == (1, [])
    assert found["no_fit"]["peak_gib"] > found["no_fit"]["capacity_gib"]
    assert all(change["peak_gib"] <= 200 for change in found["no_fit"]["changes"])
    assert found["no_fit"]["changes"]


@pytest.mark.parametrize(("batch", "nearest"), [("1000000", 999424), ("100", 4096)])
def test_an_unreachable_batch_names_the_nearest(run: Run, batch: str, nearest: int) -> None:
    found = planned(run, "llama-3.2-1b", "-c", "8xh100", "-b", batch, "-s", 4096, "--top", 1)
    assert any(f"= {nearest:,} tokens" in note for note in found["notes"])
    layout = found["plans"][0]["layout"]
    assert layout["dp"] * layout["mbs"] * layout["gas"] * 4096 == nearest


def test_explain_shows_memory_time_traffic_reasons_and_neighbours(run: Run, plan_file: Path) -> None:
    code, out, err = run("explain", plan_file)
    assert (code, err) == (0, "")
    for title in (
        "Memory at the peak of each pipeline stage, GiB",
        "Activations on the peak stage",
        "Memory over one step",
        "Time of one step",
        "Communication of one GPU in one step",
        "Reasons",
        "One step away, and why not",
        "Notes and assumptions",
    ):
        assert title in " ".join(out.split())  # a narrow table breaks its title
    assert max(map(len, out.splitlines())) <= 150
    assert "…" not in out
    assert "note: this file says" not in out


def test_explain_as_json_is_the_file(run: Run, plan_file: Path) -> None:
    assert json.loads(run("explain", plan_file, "--json")[1]) == yaml.safe_load(plan_file.read_text())


def test_explain_reports_a_stale_file(run: Run, plan_file: Path) -> None:
    data = yaml.safe_load(plan_file.read_text())
    data["estimate"]["step_time_s"] *= 2
    plan_file.write_text(yaml.safe_dump(data, sort_keys=False))
    code, out, _ = run("explain", plan_file)
    assert code == 0
    assert "note: this file says a step of" in out


def test_the_cheatsheet_has_every_strategy_untruncated(run: Run, plan_file: Path) -> None:
    code, out, _ = run("explain", plan_file, "--cheatsheet")
    assert code == 0
    assert "…" not in out
    found = json.loads(run("explain", plan_file, "--cheatsheet", "--json")[1])
    assert len(found["strategies"]) >= 6
    assert {"name", "form", "value"} <= found["formulas"][0].keys()


def test_several_what_ifs_are_compared_with_the_plan(run: Run, plan_file: Path) -> None:
    options = ["--what-if", "zero=3", "--what-if", "recompute=full,mbs=2", "--what-if", "gpus=16", "--what-if", "tp=5"]
    code, out, _ = run("explain", plan_file, *options)
    assert code == 0
    assert "tp=5: not possible: " in out
    assert "recompute=full,mbs=2" in out
    found = json.loads(run("explain", plan_file, *options, "--json")[1])
    assert [answer["change"] for answer in found] == ["zero=3", "recompute=full,mbs=2", "gpus=16", "tp=5"]
    assert (found[0]["layout"]["zero"], found[1]["layout"]["mbs"]) == (3, 2)
    assert found[0]["estimate"]["peak_gib"] != found[1]["estimate"]["peak_gib"]
    assert found[3]["estimate"] is None
    assert found[3]["problem"]


@pytest.mark.quick_cases(every=3)
@pytest.mark.parametrize(("axis", "words"), [("mbs", "mbs = "), ("seq", " tokens"), ("model", " layers = ")])
def test_largest_prints_the_limit_and_its_cause(run: Run, plan_file: Path, axis: str, words: str) -> None:
    code, out, _ = run("explain", plan_file, "--largest", axis)
    assert code == 0
    assert "Largest that fits: " in out
    assert "Limit: " in out
    found = json.loads(run("explain", plan_file, "--largest", axis, "--json")[1])
    assert found["axis"] == axis
    assert words in found["largest"]
    assert found["estimate"]["fits"] is True


def test_presets_list_models_gpus_and_clusters(run: Run) -> None:
    code, out, _ = run("presets")
    assert code == 0
    for word in ("llama-3-8b", "8,030,261,248", "h100", "'8x8 h100'", "efficiency: {matmul: 0.95}"):
        assert word in out
    assert "…" not in out
    lines = [line.strip() for line in out.splitlines()]
    assert lines[lines.index("yi") + 1].startswith("yi-6b ")
    found = json.loads(run("presets", "--json")[1])
    assert found["models"]["llama-3-8b"]["parameters"] == 8_030_261_248
    assert found["gpus"]["h100"]["sources"]


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ("8xh100", "Regime: compute-bound "),
        ("8xmi300x", "Regime: compute-bound; outside of what was measured: fewer than 2 sources measured such models on cdna3"),
    ],
)
def test_plan_says_its_regime_and_whether_it_was_measured(run: Run, cluster: str, says: str) -> None:
    code, out, _ = run("plan", "llama-3-8b", "--cluster", cluster, "--batch-tokens", "1M", "--seq", "8192", "--top", 1)
    assert code == 0
    assert says in " ".join(out.split())


def test_one_preset_shows_every_field_with_its_source(run: Run) -> None:
    code, out, _ = run("presets", "h100")
    assert code == 0
    assert "memory_bandwidth_gb_s" in out
    assert "nvidia" in out.lower()
    assert "head_dim" in run("presets", "llama-3-8b")[1]
    assert json.loads(run("presets", "H100", "--json")[1])["gpus"]["H100"]["name"] == "h100"
    assert json.loads(run("presets", "gpt2", "--json")[1])["models"]["gpt2"]["parameters"] == 124_439_808


def test_quickstart_plans_trains_and_compares(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("quickstart", "-o", tmp_path / "plan.yaml", "--out", tmp_path / "run", "--seconds", 1)
    assert code == 0
    assert "$ ultrascale plan mini --cluster here" in out
    assert "$ ultrascale train" in out
    assert "predicted and measured" in out
    if not has_gpu():
        assert "MFU" not in out
        assert "80 % interval" not in out
        assert "Measured again after training, this machine is" in out
    assert Plan.load(tmp_path / "plan.yaml").job.model.name == "mini"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert "eval_loss" in lines[-1]


def test_names_with_brackets_are_printed_as_they_are(run: Run, tmp_path: Path) -> None:
    """rich would read `[/x]` as markup and fail."""
    (tmp_path / "m.yaml").write_text("name: '[/x] :smile:'\nlayers: 4\nhidden: 512\nheads: 8\nffn: 1024\nvocab: 1000\n")
    (tmp_path / "c.yaml").write_text("gpu: h100\ngpus: 2\nname: '[/y]'\n")
    output = tmp_path / "[/z].yaml"
    code, out, _ = run("plan", tmp_path / "m.yaml", "-c", tmp_path / "c.yaml", "-b", "16k", "-s", 1024, "-o", output)
    assert code == 0
    assert out.startswith("[/x] :smile: (")
    assert run("explain", output)[1].startswith("[/x] :smile: (")


@pytest.mark.parametrize("verb", ["plan", "explain", "presets", "quickstart"])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_verb_has_help(run: Run, verb: str, flag: str) -> None:
    code, out, _ = run(verb, flag)
    assert code == 0
    assert f"ultrascale {verb}" in out


def test_help_at_80_columns_cuts_no_word(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    group = typer.main.get_group(app)
    words = [(name,) for name in group.commands]
    words += [(name, part) for name, one in group.commands.items() for part in getattr(one, "commands", {})]
    assert len(words) > 20
    for command in words:
        out = run(*command, "--help")[1]
        assert max(map(len, out.splitlines())) <= 80, command
        assert not re.search(r"[\w,/]…\s*│", out), (command, out)


def test_the_version_and_the_panels_of_the_help(run: Run) -> None:
    assert run("--version") == (0, f"{__version__}\n", "")
    code, out, _ = run("--help")
    assert code == 0
    assert [verb for verb in ("plan", "explain", "presets", "quickstart") if verb not in out] == []
    assert run()[1].strip() == out.strip()  # no verb: the same page


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ultrascale", *arguments], capture_output=True, text=True, **options)


def test_it_runs_as_a_program_with_pipeable_output() -> None:
    done = command("plan", *SMALL, "--top", "1", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["plans"]) == 1


def test_a_terminal_without_unicode_works() -> None:
    done = command("plan", *SMALL, "--top", "1", env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "8 ? h100" in done.stdout


def test_a_closed_pipe_is_no_error() -> None:
    program = f"{sys.executable} -m ultrascale presets --json | head -c 10"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    assert done.stdout.startswith("{")
    assert done.stderr == ""
