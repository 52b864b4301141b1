"""What is compiled: recomputed blocks must not slip past the compiler, and blocks alike must share one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from model.builders import initialize
from ultrascale.kernels import compile, loss
from ultrascale.model import moe
from ultrascale.model.transformer import Transformer
from ultrascale.parallel import recompute
from ultrascale.specs.blocks import MoE
from ultrascale.specs.layout import Recompute
from ultrascale.specs.model import Model

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


PARTED = "aot_eager_decomp_partition"  # the compiler's cut between forward and backward, without its code
EXPERTS = Model(
    name="experts", layers=3, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=0, vocab=64,
    moe=MoE(experts=8, top_k=2, expert_ffn=16, shared_experts=1, router="sigmoid", router_bias=True),
)  # fmt: skip


@pytest.fixture
def grouped_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: torch's grouped matmul, which a CPU has too, but slow."""
    for module in (moe, compile):
        monkeypatch.setattr(module, "has_grouped_kernel", lambda *_: True)


def loss_and_gradients(model: Transformer) -> tuple[torch.Tensor, list[torch.Tensor]]:
    tokens = torch.arange(32).view(2, 16) % TINY.vocab
    loss = model(tokens, torch.arange(16), tokens.flip(-1))
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.quick_cases(every=3)
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_one_graph_for_all_blocks_and_one_for_the_head(policy: Recompute, graphs: Graphs) -> None:
    plain, compiled = Transformer(TINY), Transformer(TINY)
    for model in (plain, compiled):
        initialize(model, 0, TINY)
    recompute.apply(compiled, policy, compiled=True)
    compile.apply(compiled)
    found, gradients = loss_and_gradients(compiled)
    assert len(graphs) == 2
    expected_loss, expected = loss_and_gradients(plain)
    torch.testing.assert_close(found, expected_loss)
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)


def test_a_chunked_loss_is_not_compiled(graphs: Graphs) -> None:
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


def counting(capacity_factor: float | None = None) -> Transformer:
    model = Transformer(EXPERTS)
    initialize(model, 0, EXPERTS)
    for router in model.routers().values():
        router.enable_stats(torch.device("cpu"))
        router.balance_grad = torch.tensor(0.5)
        router.capacity_factor = capacity_factor
    return model.bfloat16()


def trained(model: Transformer, kept: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Loss, gradients, and what the routers saw; `kept` is given what forward keeps."""
    tokens = torch.arange(64).view(2, 32) * 7 % EXPERTS.vocab

    def keep(x: Tensor) -> Tensor:
        if kept is not None:
            kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model(tokens, torch.arange(32), tokens.flip(-1))
    loss.backward()
    return (
        loss.detach(),
        [parameter.grad for parameter in model.parameters()],
        [r.pop_stats() for r in model.routers().values()],
    )


@pytest.mark.quick_cases(every=3)
@pytest.mark.usefixtures("grouped_kernel")
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_blocks_with_experts_are_one_graph_too(policy: Recompute, graphs: Graphs) -> None:
    plain, compiled = counting(), counting()
    recompute.apply(compiled, policy, compiled=True)
    compile.apply(compiled)
    loss, gradients, stats = trained(compiled)
    assert len(graphs) == 2
    expected_loss, expected, expected_stats = trained(plain)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(stats, expected_stats)
    for gradient, reference in zip(gradients, expected, strict=True):
        assert (gradient - reference).norm() <= 0.02 * reference.norm()  # bf16, rounded in other places


@pytest.mark.slow
@pytest.mark.usefixtures("grouped_kernel")
@pytest.mark.parametrize("version", ["2.11.0+cu130", torch.__version__])
def test_full_recomputation_of_expert_blocks_saves_only_their_input(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.13 from outside of what is compiled: the compiler would keep what experts make."""
    real, whole = torch.compile, list[Any]()
    monkeypatch.setattr(compile, "TorchVersion", lambda _: TorchVersion(version))
    monkeypatch.setattr(torch, "compile", lambda function: whole.append(function) or real(function, backend=PARTED))
    monkeypatch.setattr(nn.Module, "compile", lambda module: setattr(
        module, "_compiled_call_impl", real(module._call_impl, backend=PARTED)
    ))  # fmt: skip
    torch._dynamo.reset()
    plain, compiled = counting(), counting()
    recompute.apply(compiled, "full", compiled=True)
    compile.apply(compiled, "full")
    outside = TorchVersion(version) < "2.13"
    assert len(whole) == (EXPERTS.layers if outside else 0)
    assert all((block._compiled_call_impl is None) == outside for block in compiled.each_block())
    expected_loss, expected, expected_stats = trained(plain)
    kept: list[Tensor] = []
    loss, gradients, stats = trained(compiled, kept)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(stats, expected_stats)
    for gradient, reference in zip(gradients, expected, strict=True):
        assert (gradient - reference).norm() <= 0.02 * reference.norm()
    assert EXPERTS.moe is not None
    rows = 64 * EXPERTS.moe.top_k  # a row of each choice
    assert any(x.shape == (2, 32, EXPERTS.hidden) for x in kept)
    assert [tuple(x.shape) for x in kept if x.dim() == 2 and len(x) == rows] == []
    torch._dynamo.reset()


@pytest.mark.quick_cases(every=3)
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_experts_with_host_side_counts_are_not_compiled(policy: Recompute, monkeypatch: pytest.MonkeyPatch) -> None:
    """What surrounds them is compiled, and nothing fails: a full expert drops tokens, so that shapes depend on the data."""
    monkeypatch.setattr(nn.Module, "compile", lambda module: setattr(
        module, "_compiled_call_impl", torch.compile(module._call_impl, backend="eager")
    ))  # fmt: skip
    torch._dynamo.reset()
    plain, compiled = counting(1.0), counting(1.0)
    recompute.apply(compiled, policy, compiled=True)
    compile.apply(compiled)
    loss, _, stats = trained(compiled)
    expected_loss, _, expected_stats = trained(plain)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(stats, expected_stats)
    assert all(row[-1] > 0 for row in stats)
    torch._dynamo.reset()
