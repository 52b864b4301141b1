"""`ultrascale plan` with --by, --budget and --compare: the table, JSON, the written plan, the printed command, refusals."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from ultrascale import Plan
from ultrascale.cli import gpu_counts
from ultrascale.show.lines import PlainConsole

Run = Callable[..., tuple[int, str, str]]
JOB = ["llama-3.2-1b", "--batch-tokens", "256k", "--seq", "4096", "--tokens", "50B"]


def test_the_fewest_gpus_of_a_kind_are_printed_written_and_planned_again(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "plan.yaml"
    code, out, err = run("plan", *JOB, "--by", "1d", "--fix", "zero=1", "--price", "h100=2.5", "-o", output)
    assert (code, err) == (0, "")
    plan = Plan.load(output)
    gpus, estimate = plan.job.cluster.gpus, plan.estimate
    assert plan.layout.zero == 1
    assert f"{gpus} × h100" in out
    assert estimate.train_days is not None
    assert 0.3 < estimate.train_days <= 1
    assert estimate.cost_usd == pytest.approx(estimate.train_days * 24 * gpus * 2.5)
    assert "h100 700 W" in out
    assert "an upper bound for the GPUs, without hosts and switches" in out
    assert "No price" not in out
    (command,) = [line for line in out.splitlines() if line.startswith("ultrascale plan")]
    assert f"--cluster {gpus}xh100 --price h100=2.5" in command
    code, out, _ = run(*shlex.split(command)[1:], "-o", tmp_path / "again.yaml")
    assert code == 0
    assert (tmp_path / "again.yaml").read_text() == output.read_text()


def test_kinds_in_time_as_json(run: Run) -> None:
    code, out, _ = run("plan", *JOB, "--by", "1w", "--compare", "h100,mi300x", "--price", "mi300x=2", "--pue", "1.1", "--json")
    assert code == 0
    h100, mi300x = json.loads(out)["kinds"]
    assert (h100["gpu"], mi300x["gpu"]) == ("h100", "mi300x")
    assert h100["fewest"]["price_usd"] is None
    fewest = mi300x["fewest"]
    days, hours = fewest["days"], fewest["gpu_hours"]["value"]
    assert 0 < days["low"] < days["value"] <= 7
    assert days["value"] < days["high"]
    assert hours == pytest.approx(24 * fewest["gpus"] * days["value"])
    assert fewest["price_usd"]["value"] == pytest.approx(2 * hours)
    assert fewest["energy_mwh"]["value"] == pytest.approx(750 * hours * 1.1 / 1e6)
    assert mi300x["planned_days"][str(fewest["gpus"])] == days["value"]
    assert mi300x["command"].endswith(f"--cluster {fewest['gpus']}xmi300x --price mi300x=2")


@pytest.mark.parametrize(
    "words",
    [
        ["--by", "1d", "--compare", "h100,b200", "--price", "h100=2.5"],
        ["--cluster", "16xh100", "--compare", "h200,b200,mi300x", "--price", "h100=2.5,mi300x=1.99"],
    ],
    ids=["fewest", "compared"],
)
def test_the_table_fits_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    text = io.StringIO()
    console = PlainConsole(width=80)
    console.file = text
    monkeypatch.setattr(gpu_counts, "terminal", lambda: console)
    code, _, err = run("plan", *JOB, *words)
    assert (code, err) == (0, "")
    lines = text.getvalue().splitlines()
    (head,) = [number for number, line in enumerate(lines) if line.startswith("GPUs ")]
    assert all(name in lines[head] for name in ("layout", "days", "price", "MWh"))
    table = lines[head : next(number for number, line in enumerate(lines) if line.startswith("Second line"))]
    assert max(map(len, table)) <= 80
    kinds = ("h100", "b200") if "--by" in words else ("h100", "h200", "b200", "mi300x")
    assert all(any(f"× {kind} " in line for line in table) for kind in kinds)


def test_a_comparison_without_tokens_has_no_days(run: Run) -> None:
    code, out, _ = run("plan", *JOB[:-2], "--cluster", "8xh100", "--compare", "h100,h200")
    assert code == 0
    assert out.count(" × h") == 2
    assert "Days, price and energy: --tokens 15T" in out
    assert "MWh" not in out


def test_the_printed_command_names_the_network(run: Run, tmp_path: Path) -> None:
    first, again = tmp_path / "plan.yaml", tmp_path / "again.yaml"
    code, out, _ = run("plan", *JOB, "--by", "1w", "--network-gb-s", 12.5, "-o", first)
    assert code == 0
    (command,) = [line for line in out.splitlines() if line.startswith("ultrascale plan ")]
    assert "--network-gb-s 12.5" in command
    assert run(*shlex.split(command)[1:], "-o", again)[0] == 0
    assert Plan.load(again).job.cluster.network_gb_s == 12.5
    assert again.read_text() == first.read_text()


def test_a_cluster_file_keeps_its_numbers(run: Run, tmp_path: Path) -> None:
    own = "link_bandwidth_gb_s: 400\nnetwork_gb_s: 12.5\nprice_per_gpu_hour_usd: 3\n"
    (tmp_path / "cluster.yaml").write_text(f"gpu: h100\nnodes: 1\n{own}")
    words = ["--cluster", tmp_path / "cluster.yaml", "--by", "1w", "-o", tmp_path / "plan.yaml"]
    code, out, _ = run("plan", *JOB, *words)
    assert code == 0
    cluster = Plan.load(tmp_path / "plan.yaml").job.cluster
    assert (cluster.network_gb_s, cluster.price_per_gpu_hour_usd) == (12.5, 3)
    assert f"with nodes: {cluster.nodes} and gpus_per_node: {cluster.gpus_per_node} in the cluster file" in out


@pytest.mark.slow
def test_no_answer_is_an_exit_code_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    words = ["--budget", "1$", "--price", "h100=2", "--fix", "dp=8", "-o", tmp_path / "plan.yaml"]
    code, out, _ = run("plan", *JOB, *words)
    assert code == 1
    assert "which is more than the budget of 1 $: try --budget " in " ".join(out.split())
    assert not (tmp_path / "plan.yaml").exists()


BY = [*JOB, "--by", "30d"]
REFUSED: list[tuple[list[str], list[str]]] = [
    ([*JOB[:-2], "--by", "30d"], ["--by needs the tokens", "try --tokens 15T"]),
    *(
        ([*JOB, f"--by={text}"], ["--by is", "try 12h, 30d or 2w"])
        for text in ["30", "0d", "-1d", "x", "", "30m", "nand", "²d"]
    ),
    *(
        ([*JOB, f"--budget={text}"], ["--budget is", "try 2M$, 500k$ or 2e6"])
        for text in ["0", "-1", "x", "", "$", "$$1", "2Q"]
    ),
    ([*JOB, "--budget=1M"], ["--budget needs your price", "--price h100=2.5"]),
    ([*BY, "--compare", "h1000"], ["--compare", "h1000", "did you mean 'h100'"]),
    ([*BY, "--compare", ","], ["--compare is empty", "--compare h100,h200"]),
    ([*BY, "--cluster", "h1000"], ["--cluster", "h1000", "did you mean 'h100'"]),
    ([*BY, "--cluster", "64xh100"], ["--cluster is '64xh100'", "try --cluster h100"]),
    ([*BY, "--cluster", "here"], ["--cluster is 'here'", "try --cluster h100"]),
    ([*BY, "--price", "h100"], ["--price is 'h100'", "try --price h100=2.5"]),
    ([*BY, "--price", "h100=0"], ["--price h100 is '0'", "try 2.5"]),
    ([*BY, "--price", "b200=4"], ["--price is of b200", "try --compare b200"]),
    ([*BY, "--price", "=4"], ["gpu '' is not a known kind"]),
    ([*BY, "--pue=0.9"], ["--pue is 0.9", "try 1.2"]),
    ([*BY, "--pue=nan"], ["--pue is nan", "try 1.2"]),
    ([*BY, "--objective=cost"], ["--objective is 'cost'", "try --objective throughput"]),
    (JOB, ["--cluster is missing", "try --cluster 64xh100"]),
    ([*JOB, "--compare", "h200"], ["--compare needs how many GPUs", "try --cluster 64xh100"]),
    ([*JOB, "--cluster", "h100", "--compare", "h200"], ["cluster is 'h100'", "such as 64xh100"]),
]


@pytest.mark.parametrize(("words", "says"), REFUSED, ids=[" ".join(words[-2:]) for words, _ in REFUSED])
def test_what_cannot_be_used_is_one_sentence(run: Run, words: list[str], says: list[str]) -> None:
    code, out, err = run("plan", *words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    for part in says:
        assert part in err
