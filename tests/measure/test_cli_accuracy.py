"""`ultrascale accuracy` and `explain --row` from the command line: figures, files, notes, and one sentence for bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from row_builders import FULL, PUBLISHED, row, write

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Two that can be modelled, of two sources, GPUs and systems, and one that cannot."""
    return write(
        tmp_path / "runs.csv",
        row(id="one"),
        row(id="two", gpu="A100-80GB", source="other/place x", system="nanotron", compile="no", tokens_per_s_per_gpu=4000),
        row(id="three", gpu="TPU v4"),
    )


def test_accuracy_prints_the_figures_and_what_was_not_modelled(run: Run, three: Path) -> None:
    code, out, err = run("accuracy", three)
    assert (code, err) == (0, "")
    assert "3 rows, 2 modelled" in out
    assert "Not modelled: 1" in out
    assert "three: gpu is 'TPU v4'" in out
    assert "Fit or out of memory: 2 right, 0 wrong" in out


def test_json_has_the_keys_that_scripts_rely_on(run: Run, three: Path, tmp_path: Path) -> None:
    code, _, err = run("accuracy", three, "--json", tmp_path / "out.json")
    assert (code, err) == (0, "")
    found = json.loads((tmp_path / "out.json").read_text())
    assert set(found) == {"rows", "summary"}
    assert [one["id"] for one in found["rows"]] == ["one", "two", "three"]
    keys = {"id", "reason", "fits", *(f"predicted_{name}" for name in ("tokens_per_s_per_gpu", "iter_time_s", "peak_mem_gib"))}
    for one in found["rows"]:
        assert keys <= one.keys()
    one, _, three_ = found["rows"]
    assert all(isinstance(one[name], float) and one[name] > 0 for name in keys if name.startswith("predicted"))
    assert (one["fits"], one["reason"]) == (True, None)
    # mbs 1 · gas 4 · 4096 tokens a GPU and step
    assert one["predicted_tokens_per_s_per_gpu"] * one["predicted_iter_time_s"] == pytest.approx(4 * 4096)
    assert all(three_[name] is None for name in keys if name.startswith("predicted"))
    assert three_["fits"] is None
    assert "TPU v4" in three_["reason"]
    assert (found["summary"]["rows"], found["summary"]["modelled"]) == (3, 2)


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("source", ["someone/runs", "other/place"]),
        ("gpu", ["H100-80GB", "A100-80GB"]),
        ("system", ["torchtitan FSDP2", "nanotron"]),
    ],
)
def test_errors_are_grouped_by_the_given_column(run: Run, three: Path, group: str, names: list[str]) -> None:
    code, out, _ = run("accuracy", three, "--by", group)
    assert code == 0
    table = out.split(f"By {group}")[1].split("Worst")[0]
    assert all(name in table for name in names)


@pytest.mark.parametrize(("worst", "shown"), [(0, 0), (1, 1), (20, 2)])
def test_the_given_number_of_worst_rows_is_shown(run: Run, three: Path, worst: int, shown: int) -> None:
    code, out, _ = run("accuracy", three, "--worst", worst)
    assert code == 0
    table = out.split(f"Worst {worst}")[1].split("Not modelled")[0]
    assert ("\none " in table) + ("\ntwo " in table) == shown


def test_the_worst_row_comes_first(run: Run, tmp_path: Path) -> None:
    """One measured at what we predict, one at a third of it."""
    rows = write(tmp_path / "runs.csv", row(id="near", tokens_per_s_per_gpu=11_000), row(id="far", tokens_per_s_per_gpu=3_000))
    _, out, _ = run("accuracy", rows, "--worst", 2)
    table = out.split("Worst 2")[1]
    assert table.index("\nfar ") < table.index("\nnear ")


def test_the_report_contains_its_command(run: Run, three: Path, tmp_path: Path) -> None:
    code, _, _ = run("accuracy", three, "--report", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert code == 0
    assert f"ultrascale accuracy {three}" in page
    assert "| what | figure |" in page
    assert "- three: gpu is 'TPU v4'" in page


def test_unknown_columns_and_repeated_ids_are_notes_and_the_rest_is_scored(run: Run, tmp_path: Path) -> None:
    rows = write(tmp_path / "runs.csv", {**row(id="a"), "micro_batchs": "1"}, {**row(id="a"), "micro_batchs": "1"})
    code, out, err = run("accuracy", rows)
    assert code == 0
    assert "2 rows, 2 modelled" in out
    notes = err.splitlines()
    assert len(notes) == 2
    assert notes[0].startswith("note: column 'micro_batchs' is unknown and ignored: did you mean 'micro_batch'")
    assert notes[1] == "note: line 3: id 'a' stands twice"


def test_own_runs_need_no_source_and_no_measured_speed(run: Run, tmp_path: Path) -> None:
    names = ("id", "model", "seq_len", "gpu", "gpus", "micro_batch")
    code, out, _ = run("accuracy", write(tmp_path / "runs.csv", {name: FULL[name] for name in names}))
    assert code == 0
    assert "1 rows, 1 modelled" in out


BAD = {
    "by": (["--by", "colour"], ["--by", "colour", "source"]),
    "by, one letter off": (["--by", "sources"], ["--by", "did you mean 'source'"]),
    "worst below zero": (["--worst", "-1"], ["--worst", "-1"]),
    "worst too large": (["--worst", "99999"], ["--worst", "99999"]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_flag_is_one_sentence_and_exit_2(run: Run, three: Path, name: str) -> None:
    flags, says = BAD[name]
    code, out, err = run("accuracy", three, *flags)
    assert (code, out) == (2, "")
    assert all(words in err for words in says), err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "text", [None, "", "a,b,c\n1,2,3\n", ",".join(FULL) + "\n"], ids=["absent", "empty", "columns", "header"]
)
@pytest.mark.parametrize("verb", [["accuracy"], ["explain", "--row", "one"]], ids=["accuracy", "explain"])
def test_a_file_without_runs_is_one_sentence_and_exit_2(run: Run, tmp_path: Path, verb: list[str], text: str | None) -> None:
    file = tmp_path / "runs.csv"
    if text is not None:
        file.write_text(text)
    code, out, err = run(*verb, file)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: runs file {file}")
    assert len(err.splitlines()) == 1


def test_nothing_modelled_is_exit_2_with_the_reasons_and_no_file(run: Run, tmp_path: Path) -> None:
    rows = write(tmp_path / "runs.csv", row(id="a", gpu="TPU"), row(id="b", gpus="eight"))
    code, out, err = run("accuracy", rows, "--json", tmp_path / "out.json", "--report", tmp_path / "page.md")
    assert (code, out) == (2, "")
    assert "none of the 2 rows" in err
    assert "a: gpu is 'TPU'" in err
    assert "b: gpus is 'eight', not a number" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs.csv"]


def test_an_unwritable_path_is_exit_2(run: Run, three: Path) -> None:
    code, _, err = run("accuracy", three, "--json", three / "out.json")  # a file is no folder
    assert code == 2
    assert err.startswith("error: ")


# --------------------------------------------------------------------------------------------------------- explain --row


def test_one_published_run_predicted_against_measured_term_by_term(run: Run) -> None:
    """mosaic-019: MPT-70b on 64 H100s, 1,039 tokens/s/GPU printed, 63.05 s a step."""
    code, out, err = run("explain", "--row", "mosaic-019", PUBLISHED)
    assert (code, err) == (0, "")
    assert "mosaic-019: MPT-70b on 64 × H100-80GB, Composer+PyTorch FSDP1" in out
    assert "mosaicml/llm-foundry" in out
    assert "Predicted and measured" in out
    assert "1,039" in out
    assert "63.0" in out or "63.1" in out
    assert "80 % interval of the step" in out
    assert "GEMMs" in out
    assert "The largest cause is" in out


def test_assumptions_are_printed(run: Run, tmp_path: Path) -> None:
    rows = write(tmp_path / "runs.csv", row(id="a", precision="", recompute="", zero_stage="", system="my trainer"))
    code, out, _ = run("explain", "--row", "a", rows)
    assert code == 0
    for words in ("precision bf16", "recompute none", "ZeRO stage", "framework 'my trainer' taken as torchtitan"):
        assert f"assumed: {words}" in out


def test_measured_memory_is_beside_the_predicted_with_its_kind(run: Run, tmp_path: Path) -> None:
    rows = write(tmp_path / "runs.csv", row(id="a", peak_mem_gib=40, mem_kind="max allocated"))
    _, out, _ = run("explain", "--row", "a", rows)
    assert "peak memory (max allocated)" in out
    assert "40.0 GiB" in out


def test_a_row_that_is_not_modelled_is_explained_by_its_reason(run: Run, three: Path) -> None:
    code, out, _ = run("explain", "--row", "three", three)
    assert code == 0
    assert "Not modelled: gpu is 'TPU v4'" in out


def test_a_row_for_machines(run: Run, three: Path) -> None:
    code, out, _ = run("explain", "--row", "one", three, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["id"] == "one"
    assert found["measured_tokens_per_s_per_gpu"] == 11_000
    assert found["predicted_tokens_per_s_per_gpu"] == pytest.approx(found["estimate"]["tokens_per_s_per_gpu"])
    assert found["layout"]["dp"] == 8
    assert found["assumptions"] == []


@pytest.mark.parametrize(("given", "says"), [("mosaic019", "did you mean 'mosaic-019'"), ("zzz", "no such id")])
def test_an_unknown_row_is_exit_2_with_the_nearest(run: Run, given: str, says: str) -> None:
    code, out, err = run("explain", "--row", given, PUBLISHED)
    assert (code, out) == (2, "")
    assert given in err
    assert says in err


def test_a_row_and_another_question_is_exit_2(run: Run, three: Path) -> None:
    code, _, err = run("explain", "--row", "one", three, "--largest", "mbs")
    assert code == 2
    assert "one at a time" in err
