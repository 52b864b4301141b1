"""Megatron-Core builds the model of an exported run.sh, and trains it: without a GPU, from its own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plan_builders import exported, planned

from ultrascale.export.megatron import parse
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model


def arguments(name: str, folder: Path) -> dict[str, Any]:
    job = Job(model=Model.load(name), cluster=Cluster.load("1xh100"), seq=64, batch_tokens=128)
    file = exported(planned(job, Layout(mbs=2)), "megatron", folder) / "run.sh"
    return parse(file.read_text(), "run.sh")


@pytest.mark.parametrize(
    "name", ["gpt2", "llama-3.1-8b", "qwen2.5-7b", "qwen3-8b", "smollm2-360m", "nemotron-8b", "mixtral-8x7b"]
)
def test_its_model_has_our_number_of_parameters(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shape, biases, norms, positions, ties and experts in one figure, to the digit."""
    import megatron_built

    given = arguments(name, tmp_path)
    with megatron_built.one_rank(monkeypatch), torch.device("meta"):
        built = megatron_built.model(given)
    assert sum(parameter.numel() for parameter in built.parameters()) == Model.load(name).parameters


def test_its_model_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron_built

    given = arguments("tiny", tmp_path)
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (2, 64))
    places, mask = torch.arange(64).expand(2, 64), torch.ones(1, 1, 64, 64, dtype=torch.bool).triu(1)
    losses = []
    with megatron_built.one_rank(monkeypatch):
        built = megatron_built.model(given)
        assert sum(parameter.numel() for parameter in built.parameters()) == Model.load("tiny").parameters
        optimizer = torch.optim.AdamW(built.parameters(), lr=10 * float(given["--lr"]))
        for _ in range(4):
            loss = built(ids, places, mask, labels=ids).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.97 * losses[0]
