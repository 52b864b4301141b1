"""What a step logs of its experts: the whole table of a small model, a few figures per layer of a large one."""

from __future__ import annotations

import json

import pytest
import torch

from ultrascale.train import log
from ultrascale.train.balance import WHOLE_TABLE, RouterLoads
from ultrascale.train.log import StepRecord


def loads(tokens: torch.Tensor, balance: float = 6.0, dropped: float = 0.0) -> RouterLoads:
    """Of three sequences, in a model with one dense layer."""
    ends = torch.tensor([[balance, dropped]]).expand(len(tokens), -1)
    return RouterLoads(torch.cat([tokens, ends], dim=1), sequences=3, layers=tuple(range(1, 1 + len(tokens))))


def record(stats: RouterLoads) -> StepRecord:
    return StepRecord(
        step=1, tokens=8, loss=1.0, grad_norm=1.0, lr=1.0, tokens_per_s_per_gpu=1.0, mfu=None, peak_gib=None,
        expert_load=stats.busiest, expert_tokens=stats.per_expert, expert_quantiles=stats.quantiles,
    )  # fmt: skip


def test_a_small_model_logs_every_expert() -> None:
    stats = loads(torch.tensor([[4.0, 0.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]]), dropped=5.0)
    assert stats.busiest == (2.0, 1.0)
    assert (stats.balance_loss, stats.dropped, stats.broken) == (2.0, 10, ())
    written = json.loads(json.dumps(record(stats).values()))
    assert written["expert_tokens"] == [[4, 0, 1, 3], [2, 2, 2, 2]]
    assert "expert_quantiles" not in written


def test_a_large_model_logs_five_quantiles_per_layer() -> None:
    layers, experts = 17, 256
    assert layers * experts > WHOLE_TABLE >= 16 * experts
    tokens = torch.arange(experts).float().flip(0).expand(layers, -1)
    written = record(loads(tokens)).values()
    assert "expert_tokens" not in written
    # 255 · i / 4 = 0, 63.75, 127.5, 191.25, 255: the nearest experts, a half to the even one.
    assert written["expert_quantiles"] == ((0, 64, 128, 191, 255),) * layers


def test_tables_are_no_curves() -> None:
    curves = log._curves(record(loads(torch.tensor([[4.0, 0.0], [2.0, 2.0]]))))
    assert curves["expert_load"] == 2.0
    assert not {"expert_tokens", "expert_quantiles"} & curves.keys()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_router_without_numbers_is_named_by_its_layer(value: float) -> None:
    table = loads(torch.ones(3, 2)).table.clone()
    table[1, -2] = value
    assert RouterLoads(table, 3, layers=(1, 2, 3)).broken == (2,)
