"""Models with experts under every technique against one process: losses, gradients, and router statistics."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from parallel.harness import check, in_ranks, job_of, one_process, train, training_of
from ultrascale.launch import local
from ultrascale.measure.rehearse_tracker import OperatorTracker
from ultrascale.model.moe import MixtureOfExperts
from ultrascale.model.transformer import MLP
from ultrascale.parallel import expert, expert_layer
from ultrascale.parallel.comm import Axis
from ultrascale.parallel.expert import DISPATCHERS, AsyncAllToAll, LocalTokensFirst, TokenDispatcher, dispatched_forward
from ultrascale.parallel.expert_layer import ParallelExperts
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.training import ExpertOverlap, Training
from ultrascale.train import build, supported
from ultrascale.train.engine import Engine

slow = pytest.mark.slow
BALANCED = training_of(balance_loss=0.5, router_bias_rate=0.05)

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("experts", {"dp": 2}),
    "dp2, torch's": ("deepseek", {"dp": 2, "gas": 2, "data_parallel": "ddp"}),
    "zero1": ("deepseek", {"dp": 2, "gas": 2, "zero": 1}),
    "zero2": ("experts", {"dp": 2, "gas": 2, "zero": 2}),
    "zero3": ("qwen2-moe", {"dp": 2, "gas": 2, "zero": 3}),
    "tp2": ("qwen2-moe", {"tp": 2, "gas": 2}),
    "tp2 without sequence parallelism": ("deepseek", {"tp": 2, "gas": 2, "sequence_parallel": False}),
    "tp4": ("experts", {"tp": 4, "gas": 1, "mbs": 2}),
    "cp2": ("deepseek", {"cp": 2, "gas": 2}),
    "cp2, ulysses": ("experts", {"cp": 2, "gas": 1, "mbs": 2, "context_parallel": "ulysses"}),
    "pp2": ("qwen2-moe", {"pp": 2, "gas": 4}),
    "zero-bubble": ("qwen2-moe", {"pp": 2, "gas": 4, "schedule": "zero-bubble"}),
    "zb-v": ("deepseek", {"pp": 2, "gas": 4, "schedule": "zb-v", "virtual_stages": 2}),
    "selective": ("deepseek", {"gas": 2, "recompute": "selective"}),
    "full": ("qwen2-moe", {"tp": 2, "gas": 2, "recompute": "full"}),
}
LAYOUTS |= {
    "ep2": ("experts", {"dp": 2, "ep": 2}),
    "ep2, hooks": ("qwen2-moe", {"dp": 2, "ep": 2, "gas": 2, "data_parallel": "hooks"}),
    "ep2 of dp4": ("deepseek", {"dp": 4, "ep": 2, "gas": 2}),
    "ep4": ("experts", {"dp": 4, "ep": 4, "gas": 1}),
    "ep2 over cp2": ("deepseek", {"cp": 2, "ep": 2, "gas": 2}),
    "ep2 zero1": ("deepseek", {"dp": 2, "ep": 2, "gas": 2, "zero": 1}),
    "ep2 of dp4 zero3": ("qwen2-moe", {"dp": 4, "ep": 2, "gas": 2, "zero": 3}),
    "ep2 of dp4 zero2 in two": ("experts", {"dp": 4, "ep": 2, "gas": 2, "zero": 2, "zero_shards": 2}),
    "ep2 of dp4 zero2 recomputed": ("experts", {"dp": 4, "ep": 2, "gas": 2, "zero": 2, "recompute": "selective"}),
    "ep2 of dp4 zero3 recomputed": ("qwen2-moe", {"dp": 4, "ep": 2, "gas": 2, "zero": 3, "recompute": "selective"}),
    "ep2 of dp4 zero3 gathered once, recomputed": (
        "experts",
        {"dp": 4, "ep": 2, "gas": 2, "zero": 3, "recompute": "selective", "keep_gathered": True},
    ),
    "more ranks than experts": ("two-experts", {"dp": 4, "gas": 2, "zero": 3, "recompute": "selective"}),
    "more ranks than experts, pp2 zero-bubble": (
        "two-experts",
        {"dp": 2, "ep": 2, "cp": 2, "pp": 2, "gas": 4, "zero": 1, "schedule": "zero-bubble"},
    ),
    "ep2 of dp4 zero2 with one expert each": ("two-experts", {"dp": 4, "ep": 2, "gas": 2, "zero": 2}),
    "ep2 tp2": ("qwen2-moe", {"dp": 2, "ep": 2, "tp": 2, "gas": 2}),
    "ep2 recomputed": ("deepseek", {"dp": 2, "ep": 2, "gas": 2, "recompute": "selective", "data_parallel": "naive"}),
    "ep2 pp2, zero-bubble": ("deepseek", {"dp": 2, "ep": 2, "pp": 2, "gas": 4, "schedule": "zero-bubble"}),
}
LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2 dp2 zero3": ("qwen2-moe", {"tp": 2, "dp": 2, "gas": 2, "zero": 3}),
    "tp2 cp2": ("deepseek", {"tp": 2, "cp": 2, "gas": 2, "recompute": "selective"}),
    "pp2 dp2 zero2, dualpipe-v": (
        "experts",
        {"pp": 2, "dp": 2, "gas": 4, "zero": 2, "schedule": "dualpipe-v", "virtual_stages": 2},
    ),
    "pp2 tp2, zero-bubble": ("deepseek", {"pp": 2, "tp": 2, "gas": 4, "schedule": "zero-bubble"}),
    "dp4 zero1 in two": ("deepseek", {"dp": 4, "gas": 2, "zero": 1, "zero_shards": 2}),
    "ep2 pp2 zero3, zb-v": (
        "deepseek",
        {"dp": 2, "ep": 2, "pp": 2, "gas": 4, "zero": 3, "schedule": "zb-v", "virtual_stages": 2},
    ),
    "ep2 of dp4 pp2 zero2, dualpipe-v": (
        "eight-experts",
        {"dp": 4, "ep": 2, "pp": 2, "gas": 4, "zero": 2, "schedule": "dualpipe-v", "virtual_stages": 2, "recompute": "full"},
    ),
    "ep4 of dp4 tp2 zero3": ("experts", {"dp": 4, "ep": 4, "tp": 2, "gas": 1, "zero": 3, "recompute": "full"}),
    "ep4 over dp2 cp2": ("experts", {"dp": 2, "cp": 2, "ep": 4, "tp": 2, "gas": 1, "zero": 1}),
    "ep8 zero3": ("deepseek", {"dp": 8, "ep": 8, "gas": 1, "zero": 3}),
    "ep2 of dp8 zero3 in four": ("deepseek", {"dp": 8, "ep": 2, "gas": 1, "zero": 3, "zero_shards": 4}),
    "tp2 dp4 zero3 with more ranks than experts": ("two-experts", {"tp": 2, "dp": 4, "gas": 2, "zero": 3, "recompute": "full"}),
    "ep2 of dp4 tp2 zero1 with one expert each": ("two-experts", {"tp": 2, "dp": 4, "ep": 2, "gas": 2, "zero": 1}),
    "ep2 of dp8 tp1 more ranks than experts": ("qwen2-moe", {"dp": 8, "ep": 2, "gas": 1, "zero": 3}),
    "interleaved zero3": (
        "eight-experts",
        {"pp": 2, "dp": 2, "gas": 4, "schedule": "interleaved", "virtual_stages": 2, "zero": 3, "recompute": "full"},
    ),
}
LONG |= {
    name: LAYOUTS.pop(name)
    for name in (
        "dp2, torch's",
        "zero2",
        "tp4",
        "cp2, ulysses",
        "pp2",
        "selective",
        "ep2, hooks",
        "ep4",
        "ep2 zero1",
        "ep2 of dp4 zero2 recomputed",
        "ep2 of dp4 zero3 recomputed",
        "ep2 recomputed",
    )
}
CASES = [*LAYOUTS.values(), *(pytest.param(*case, marks=slow) for case in LONG.values())]


@pytest.mark.quick_cases("dp2", "tp2", "zb-v", "ep2", "ep2 of dp4 zero3", "more ranks than experts")
@pytest.mark.parametrize(("family", "fields"), CASES, ids=[*LAYOUTS, *LONG])
def test_the_same_as_one_process(family: str, fields: dict[str, Any]) -> None:
    check(family, BALANCED, **fields)


BEHIND: list[Any] = [
    ("experts", {"dp": 2, "ep": 2, "gas": 2}),
    ("qwen2-moe", {"dp": 4, "ep": 2, "gas": 2, "zero": 3, "recompute": "selective"}),
    ("deepseek", {"dp": 2, "ep": 2, "pp": 2, "gas": 4, "schedule": "zero-bubble"}),
    ("two-experts", {"dp": 4, "ep": 2, "gas": 2, "zero": 3}),
    *(
        pytest.param(family, fields, marks=slow)
        for family, fields in (
            ("qwen2-moe", {"dp": 2, "ep": 2, "tp": 2, "gas": 2, "data_parallel": "hooks"}),
            ("deepseek", {"cp": 2, "ep": 2, "gas": 2, "recompute": "full"}),
            ("experts", {"dp": 4, "ep": 4, "gas": 1, "zero": 1}),
            ("qwen2-moe", {"dp": 4, "ep": 2, "gas": 2, "zero": 3, "zero_shards": 2}),
            ("deepseek", {"dp": 4, "ep": 2, "gas": 2, "zero": 2}),
            ("deepseek", {"dp": 2, "ep": 2, "pp": 2, "gas": 4, "zero": 3, "schedule": "zb-v", "virtual_stages": 2}),
        )
    ),
]


@pytest.mark.quick_cases(every=4)
@pytest.mark.parametrize("overlap", ["gradients", "rows"])
@pytest.mark.parametrize(("family", "fields"), BEHIND, ids=str)
def test_overlapping_experts_with_dispatch_changes_no_result(family: str, fields: dict[str, Any], overlap: str) -> None:
    check(family, BALANCED.changed(expert_overlap=overlap), **fields)


@pytest.mark.parametrize("overlap", ["gradients", "rows"])
def test_overlapping_changes_no_result_with_dropped_tokens(overlap: str) -> None:
    check("experts", training_of(capacity_factor=1.0, expert_overlap=overlap), dp=4, ep=4, gas=1)


def test_deferred_weight_gradients_are_bitwise_equal() -> None:
    """Computed later, from the same rows in the same order."""
    layout = Layout(dp=2, ep=2, gas=2)
    none, late = (
        in_ranks(train, job_of("deepseek"), layout, training_of(expert_overlap=overlap)) for overlap in ("none", "gradients")
    )
    for one, other in zip(none, late, strict=True):
        assert one.losses == other.losses
        assert all(torch.equal(a.gradient, b.gradient) for a, b in zip(one.pieces, other.pieces, strict=True))


def exchanged(engine: Engine) -> dict[Any, Any]:
    mesh = engine.mesh
    axes = {name: getattr(mesh, name).group for name in ("world", "shard", "expert_shard", "ep")}
    engine.step(0)
    watch = OperatorTracker(engine, {str(group.group_name): name for name, group in axes.items()})
    with watch:
        engine.step(1)
    return dict(watch.calls)


@pytest.mark.slow
def test_overlap_does_not_change_the_communicated_bytes() -> None:
    """Rows that stay go along, and matrices are gathered for both parts at once."""
    layout = Layout(dp=4, ep=2, zero=3, gas=2)
    exchanged_bytes = [
        in_ranks(exchanged, job_of("qwen2-moe"), layout, training_of(expert_overlap=overlap)) for overlap in DISPATCHERS
    ]
    assert exchanged_bytes[0][0]
    assert exchanged_bytes[0] == exchanged_bytes[1] == exchanged_bytes[2]


def loads(engine: Engine) -> list[Any]:
    """Of three steps: tokens of every expert, balance loss and dropped tokens; and the biases at the end."""
    stats = []
    for number in range(3):
        found = engine.step(number).loads
        assert found is not None
        stats.append((found.tokens.tolist(), round(found.balance_loss, 5), found.dropped))
    return stats


@pytest.mark.quick_cases(every=3)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, zero=3, gas=2),
        Layout(dp=4, ep=2, zero=1),
        Layout(tp=2, gas=4, recompute="full"),
        Layout(cp=2, mbs=4),
        Layout(pp=2, gas=4),
    ],
    ids=str,
)
def test_router_statistics_do_not_depend_on_the_layout(layout: Layout) -> None:
    job = job_of("deepseek")
    alone = in_ranks(loads, job, Layout(mbs=4), BALANCED)[0]
    assert sum(alone[0][0][0]) == 4 * job.seq * 2  # every token chooses two
    for rank in in_ranks(loads, job, layout, BALANCED):
        assert rank == alone


def test_dropped_tokens_do_not_depend_on_the_layout() -> None:
    training = training_of(capacity_factor=1.0)
    alone = in_ranks(loads, job_of("experts"), Layout(mbs=4), training)[0]
    assert alone[0][2] > 0
    assert in_ranks(loads, job_of("experts"), Layout(dp=2, tp=2, gas=2), training)[3] == alone
    check("experts", training, dp=2, gas=2)
    check("experts", training, dp=4, ep=4, gas=1)


def biases(engine: Engine) -> dict[str, list[float]]:
    found = {}
    for number in range(3):
        before = [weight.master.clone() for weight in engine.weights]
        result = engine.step(number)
        assert result.loads is not None
        for weight, old in zip(engine.weights, before, strict=True):
            if weight.shard.name.endswith("router.bias"):
                tokens = result.loads.tokens[int(weight.shard.name.split(".")[1]) - 1]
                assert ((weight.master - old) / 0.05).round().tolist() == (tokens.mean() - tokens).sign().tolist()
                found[weight.shard.name] = weight.master.tolist()
    return found


def test_biases_depend_only_on_loads() -> None:
    (found,) = in_ranks(biases, job_of("deepseek"), Layout(mbs=4), BALANCED)
    assert len(found) == 3
    still = in_ranks(biases_after_nothing, job_of("deepseek"), Layout(mbs=4), BALANCED.changed(router_bias_rate=0.0))[0]
    assert not any(any(values) for values in still)


def biases_after_nothing(engine: Engine) -> list[list[float]]:
    engine.step(0)
    return [weight.master.tolist() for weight in engine.weights if weight.shard.name.endswith("router.bias")]


def test_a_large_balance_loss_balances_the_experts() -> None:
    """What the balance loss is for."""
    ended = {}
    for weight in (0.0, 10.0):
        training = Training(steps=12, seed=1, lr=1e-2, warmup_steps=0, data="synthetic", balance_loss=weight)
        ended[weight] = in_ranks(last_balance, job_of("experts"), Layout(mbs=4), training)[0]
    assert ended[10.0] < ended[0.0]
    assert ended[10.0] == pytest.approx(1.0, abs=0.05)


def last_balance(engine: Engine) -> float:
    found = [engine.step(number).loads for number in range(engine.training.steps)][-1]
    assert found is not None
    return found.balance_loss


def test_the_reported_loss_excludes_the_balance_loss() -> None:
    """With and without a balance loss the first step reports the same."""
    plain, pulled = (one_process(job_of("experts"), 4, training_of(balance_loss=weight)) for weight in (0.0, 1.0))
    assert plain.losses[0] == pulled.losses[0]
    assert plain.losses[1] != pulled.losses[1]


def rows_of(rank: int, nproc: int, store: str, own: int) -> tuple[list[float], list[float]]:
    """Rank r sends r + i rows of the number 10 r + i to rank i, but `own` to itself; and combines the gradients."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    axis = Axis("ep", dist.group.WORLD, rank, nproc, tuple(range(nproc)))
    counts = torch.tensor([own if there == rank else rank + there for there in range(nproc)])
    values = torch.tensor([10.0 * rank + there for there in range(nproc)]).repeat_interleave(counts)
    rows = values.unsqueeze(1).requires_grad_()
    visit = (LocalTokensFirst if own else TokenDispatcher)(axis, rows, counts)
    received: list[torch.Tensor] = []

    def experts(coming: torch.Tensor, counts: Any = None, receive: Any = None, local_rows: Any = None) -> Any:
        found = [coming] if receive is None else [local_rows[0], receive(coming)[0]]
        received.extend(found)
        outputs = [rows * (rank + 1) for rows in found]
        return outputs[0] if receive is None else outputs

    visit.run_experts(experts)  # type: ignore[arg-type]
    back = visit.combine()
    (back * 2).sum().backward()
    assert rows.grad is not None
    dist.destroy_process_group()
    assert torch.equal(back.detach().flatten(), values * (1 + values % 10))
    return sorted(set(torch.cat(received).flatten().tolist())), rows.grad.flatten().tolist()


def test_uneven_rows_are_dispatched_and_combined() -> None:
    found = local.run(rows_of, 3, 0, timeout_s=60)
    assert [numbers for numbers, _ in found] == [[10, 20], [1, 21], [2, 12]]
    # The gradient of a row is twice the factor of the rank that it visited.
    assert [gradient for _, gradient in found] == [[4, 6, 6], [2, 6, 6, 6], [2, 2, 4, 4, 4]]


def test_local_rows_are_merged_with_received_rows() -> None:
    found = local.run(rows_of, 3, 2, timeout_s=60)
    assert [numbers for numbers, _ in found] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    assert [gradient for _, gradient in found] == [[2, 2, 4, 6, 6], [2, 4, 4, 6, 6, 6], [2, 2, 4, 4, 4, 6, 6]]


def order_of_events(rank: int, nproc: int, store: str, overlap: ExpertOverlap) -> tuple[list[str], list[str]]:
    """What one layer with a shared expert does, one thing after the other: forward, then backward."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    axis = Axis("ep", dist.group.WORLD, rank, nproc, tuple(range(nproc)))
    heard: list[str] = []

    class LoggingExchange(AsyncAllToAll):
        def start(self, splits: Any, rows: torch.Tensor) -> None:
            heard.append("begin")
            super().start(splits, rows)

        def wait(self) -> torch.Tensor:
            heard.append("end")
            return super().wait()

    def logged(name: str, function: Any) -> Any:
        def heard_of(*given: Any) -> Any:
            heard.append(name)
            return function(*given)

        return mock.patch.object(expert_layer, function.__name__, heard_of)

    model = job_of("deepseek").model
    assert model.moe is not None
    shared = MLP(model, model.moe.shared_expert_ffn)
    layer = MixtureOfExperts(model, model.moe.model_copy(update={"experts": 4}), shared)
    layer.router.moe = model.moe  # eight experts, of which four are here
    layer.router.weight, layer.router.bias = torch.nn.Parameter(torch.empty(8, model.hidden)), torch.zeros(8)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ParallelExperts.of(layer)
    layer.forward = partial(dispatched_forward, layer, partial(DISPATCHERS[overlap], axis))  # type: ignore[method-assign]
    for name, module in (("first products", shared.inputs), ("last product", shared.down)):
        module.register_forward_hook(lambda *_, name=name: heard.append(name))
        module.register_full_backward_hook(lambda *_, name=name: heard.append(name))
    x = torch.randn(2, 8, model.hidden, requires_grad=True)
    patched = mock.patch.object(expert, "AsyncAllToAll", LoggingExchange)
    with patched, logged("experts", expert_layer.grouped_gemms), logged("their weights", expert_layer.grouped_weight_grad):
        out = layer(x)
        forward = list(heard)
        heard.clear()
        out.sum().backward()
    dist.destroy_process_group()
    return [name for name, _ in groupby(forward)], [name for name, _ in groupby(heard)]


FORWARD = ["begin", "first products", "end", "experts", "begin", "last product", "end"]


def test_shared_experts_overlap_dispatch_in_both_passes() -> None:
    one = ["experts", "their weights"]  # each matmul's, one after the other
    for forward, backward in local.run(order_of_events, 2, "none", timeout_s=60):
        assert forward == FORWARD
        assert backward == ["begin", "last product", "end", *one, *one, *one, "begin", "first products", "end"]


def test_expert_weight_gradients_overlap_the_backward_all_to_all() -> None:
    for forward, backward in local.run(order_of_events, 2, "gradients", timeout_s=60):
        assert forward == FORWARD
        assert backward == ["begin", "last product", "end", "experts", "begin", "their weights", "first products", "end"]


def test_local_rows_are_computed_during_the_all_to_all_in_both_passes() -> None:
    for forward, backward in local.run(order_of_events, 2, "rows", timeout_s=60):
        assert forward == ["begin", "first products", "experts", *FORWARD[2:]]
        overlapped = ["experts", "their weights", "first products"]
        assert backward == ["begin", "last product", "end", "experts", "begin", *overlapped, "end"]


@pytest.mark.parametrize(
    ("overlap", "fields", "says"),
    [("rows", {"dp": 2}, "ep = 1"), ("gradients", {}, "ep = 1"), ("auto", {"dp": 2}, None), ("rows", {"dp": 2, "ep": 2}, None)],
)
def test_overlap_without_dispatch_is_refused(overlap: str, fields: dict[str, Any], says: str | None) -> None:
    layout = Layout(**fields)
    job = job_of("experts").changed(cluster=Cluster.load(f"{layout.gpus}xh100"), batch_tokens=layout.batch_tokens(32))
    problem = supported.layout_problem(job, layout, training_of(expert_overlap=overlap))
    assert problem is None if says is None else problem is not None and says in problem and "try auto" in problem


def test_auto_overlap_is_selected_on_gpus_only() -> None:
    model = Model.load("mixtral-8x7b")
    selected = {}
    for tokens in (512, 16384):
        job = Job(model=model, cluster=Cluster.load("8xh100"), seq=tokens, batch_tokens=8 * tokens)
        layout = Layout(dp=8, ep=8)
        assert build.expert_overlap(job, layout, Training(), "cpu") == "none"
        assert build.expert_overlap(job, layout.changed(ep=1), Training(), "cuda") == "none"
        assert build.expert_overlap(job, layout, Training(expert_overlap="none"), "cuda") == "none"
        selected[tokens] = build.expert_overlap(job, layout, Training(), "cuda")
    assert selected == {512: "gradients", 16384: "rows"}
