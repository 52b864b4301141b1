"""The model of elementwise memory traffic against the operators torch dispatches, and how rates are measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ultrascale.cost import host
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.hardware import ClusterRates
from ultrascale.launch import cpu_rates
from ultrascale.launch.cpu_rates import CPURates, LinkRate
from ultrascale.launch.machine import cpu_cluster
from ultrascale.model.rotary import tables
from ultrascale.model.transformer import Block
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

BANDWIDTH = 1e10
SEQ = 64


class Passed(TorchDispatchMode):
    """Bytes that operators read and write; views move none, and matmuls and attention have laws of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and not any(name in str(func) for name in ("mm.", "attention", "_unsafe_view", "detach")):
            tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor)]
            self.bytes += sum(each.numel() * each.element_size() for each in tensors)
        return out


@pytest.mark.parametrize("name", ["tiny", "mini"])
def test_a_layers_memory_traffic_equals_the_model(name: str) -> None:
    model, layout = Model.load(name), Layout(mbs=4)
    cluster = cpu_cluster(1, CPURates(1e10, BANDWIDTH, 5e-6, 5e9, 5e9, 5e8), LinkRate(1e9, 1e-4), 2.0**34)
    job = Job(model=model, cluster=cluster, seq=SEQ, batch_tokens=4 * SEQ, precision="fp32")
    law = host.cpu_elementwise(job, LayoutColumns.of([layout]), ClusterRates(job), LayerKind())
    block, rope = Block(model, 0), tables(model, torch.arange(SEQ))
    x = torch.randn(4, SEQ, model.hidden, requires_grad=True)
    with Passed() as forward:
        out = block(x, rope)
    gradient = torch.randn_like(out)
    with Passed() as backward:
        out.backward(gradient)
    assert forward.bytes / BANDWIDTH == pytest.approx(float(law.forward[0]), rel=0.06)
    assert backward.bytes / BANDWIDTH == pytest.approx(float(law.input_grad[0]), rel=0.06)


def test_timed_operators_have_the_counted_memory_traffic() -> None:
    act = cpu_rates._passes(SEQ)
    act()  # the first finds no gradient to add to
    with Passed() as timed:
        act()
    assert timed.bytes == pytest.approx(SEQ * cpu_rates._passed_bytes(), rel=0.06)


def test_attention_score_time_is_split_into_its_parts() -> None:
    scores, softmax_s, matmul_s = 4 * 512 * 512, 1e-9, 2e-11

    def attended(width: int) -> tuple[float, float]:
        """Forward: softmax, and matmuls by the width; backward 2.6 times the one and three times the other."""
        forward = scores * (softmax_s + matmul_s * width)
        return forward, forward + scores * (2.6 * softmax_s + 3 * matmul_s * width)

    took = {"matmul": 1e-3, "layers": 4e-3, "passes": 2e-3, "few": 1e-3}
    for width in (128, 8):
        took |= dict(zip((f"forward {width}", f"both {width}"), attended(width), strict=True))
    found = cpu_rates.from_times(took)
    assert found.matmul_flops == pytest.approx(2 * 512**3 / 1e-3)
    assert found.operator_s == pytest.approx(1e-3 / 530)
    assert found.stream_bytes_s == pytest.approx(1016 * cpu_rates._passed_bytes() / 1e-3)
    assert found.softmax_scores_s == pytest.approx(1 / softmax_s)
    assert found.attention_forward_flops == pytest.approx(4 / matmul_s)
    assert found.attention_backward_flops == pytest.approx(10 / (3 * matmul_s))
