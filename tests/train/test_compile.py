"""What is compiled: recomputed blocks must not slip past the compiler, and blocks alike must share one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ultrascale.model import loss
from ultrascale.model.init import initialize
from ultrascale.model.transformer import Transformer
from ultrascale.specs.layout import Recompute
from ultrascale.specs.model import Model
from ultrascale.train import compile, recompute

TINY = Model(name="tiny", layers=3, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=64)

Graphs = list[torch.fx.GraphModule]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """Each graph that torch.compile captures, run as it is: what is tested is the capture, not the code made of it."""
    found: Graphs = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(graph)
        return graph.forward

    def compiled(module: nn.Module) -> None:
        module._compiled_call_impl = torch.compile(module._call_impl, backend=keep, fullgraph=True)

    monkeypatch.setattr(nn.Module, "compile", compiled)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def loss_and_gradients(model: Transformer) -> tuple[torch.Tensor, list[torch.Tensor]]:
    tokens = torch.arange(32).view(2, 16) % TINY.vocab
    loss = model(tokens, torch.arange(16), tokens.flip(-1))
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_one_graph_for_all_blocks_and_one_for_the_head(policy: Recompute, graphs: Graphs) -> None:
    plain, compiled = Transformer(TINY), Transformer(TINY)
    for model in (plain, compiled):
        initialize(model, 0, TINY)
    recompute.apply(compiled, policy)
    compile.apply(compiled)
    found, gradients = loss_and_gradients(compiled)
    assert len(graphs) == 2
    expected_loss, expected = loss_and_gradients(plain)
    torch.testing.assert_close(found, expected_loss)
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)


def test_a_chunked_loss_stays_out_of_the_graphs(graphs: Graphs) -> None:
    """Blocks share one graph and the last norm has one; the loss is neither compiled nor done twice."""
    plain, compiled = Transformer(TINY), Transformer(TINY)
    for model in (plain, compiled):
        initialize(model, 0, TINY)
    loss.apply(compiled)
    compile.apply(compiled)
    found, gradients = loss_and_gradients(compiled)
    assert len(graphs) == 2
    assert not any("linear" in node.name for node in graphs[1].graph.nodes)  # the head's weight is no input of the last
    expected_loss, expected = loss_and_gradients(plain)
    torch.testing.assert_close(found, expected_loss)
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)
