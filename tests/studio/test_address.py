"""An address encodes what a page shows, and nothing in it reaches the disk."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

from ultrascale import Layout, Model, SpecError
from ultrascale.studio.address import LONGEST, PlannerQuery, pasted


def test_an_address_survives_the_round_trip() -> None:
    ask = PlannerQuery(model="llama-3-70b", nodes="16", seq="4096", fix="tp=8,pp=2", layout="mbs=2", theme="dark")
    assert PlannerQuery.from_query(dict(parse_qsl(ask.query()))) == ask
    assert PlannerQuery().query() == ""
    assert PlannerQuery.from_query({"unknown": "x"}) == PlannerQuery()


def test_the_job_is_parsed_from_the_address() -> None:
    job = PlannerQuery(model="llama-3.2-1b", gpu="h200", nodes="2", per_node="4", batch="512k", seq="4k").job()
    assert (job.cluster.gpus, job.batch_tokens, job.seq, job.cluster.gpu.name) == (8, 2**19, 4096, "h200")
    layout = PlannerQuery(layout="tp=2, recompute=full").own_layout(job, Layout(dp=8, gas=16))
    assert layout is not None
    assert (layout.tp, layout.dp, layout.recompute, layout.gas) == (2, 4, "full", 32)


def test_pasted_models() -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
              "intermediate_size": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 128}  # fmt: skip
    assert pasted(json.dumps(config)).layers == 2
    tiny = Model.load("tiny").model_dump(mode="json", exclude_defaults=True)
    assert pasted(json.dumps(tiny)) == Model.load("tiny")


@pytest.mark.parametrize(
    ("ask", "word"),
    [
        (PlannerQuery(model="lama-3-8b"), "llama-3-8b"),
        (PlannerQuery(gpu="h1000"), "h100"),
        (PlannerQuery(nodes="-1"), "nodes"),
        (PlannerQuery(nodes="99999999"), "nodes"),
        (PlannerQuery(nodes="60000"), "at most"),
        (PlannerQuery(seq="long"), "seq"),
        (PlannerQuery(framework="x"), "framework"),
        (PlannerQuery(shape="[1, 2"), "pasted model"),
        (PlannerQuery(shape="layers: many"), "layers"),
    ],
)
def test_a_bad_request_has_an_error(ask: PlannerQuery, word: str) -> None:
    with pytest.raises(SpecError, match=word):
        ask.job()


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text("layers: 2\n")
    with pytest.raises(SpecError, match="model is"):
        PlannerQuery(model=str(file)).job()
    with pytest.raises(SpecError, match="gpu is"):
        PlannerQuery(gpu=str(file)).job()


def test_fields_are_bounded() -> None:
    assert len(PlannerQuery.from_query({"shape": "x" * 10**6}).shape) == LONGEST


@pytest.mark.parametrize("name", ["nodes", "per_node"])
@pytest.mark.parametrize("text", ["9" * 5000, "9" * 4000, "65537", "000001", "²", "٣", "-1", "+1", "1e3", "", " 1", "nan"])
def test_an_invalid_number_of_nodes_has_an_error(name: str, text: str) -> None:
    with pytest.raises(SpecError, match=rf"{name} is '.*' but must be a whole number from 1 to 65,536, such as 8") as caught:
        PlannerQuery.from_query({name: text}).job()
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize("name", [field.name for field in fields(PlannerQuery)])
@pytest.mark.parametrize("text", ["9" * 5000, "=" * 5000, "\0\x1b", "[" * 5000, "nan", "a=b,c=d", "tp=" + "9" * 4000, "²"])
def test_every_field_of_an_address_is_used_or_refused(name: str, text: str) -> None:
    ask = PlannerQuery.from_query({name: text})
    assert PlannerQuery.from_query(dict(parse_qsl(ask.query()))) == ask
    try:
        job = ask.job()
        ask.own_layout(job, Layout(dp=64, mbs=1, gas=2))
    except SpecError as refused:
        assert 0 < len(str(refused)) < 1000  # noqa: PT017  (either answer is one)


def test_each_wrong_field_has_its_own_error() -> None:
    ask = PlannerQuery(nodes="many", seq="long", fix="tp=8,tpp=2", forbid="cp")
    errors = ask.field_errors()
    assert set(errors) == {"nodes", "seq", "fix"}
    assert "tp" in errors["fix"]
    assert PlannerQuery().field_errors() == {}
