"""`verify --engine megatron`: its parallel code computes what our engine computes, and faults planted into it are named."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ultrascale.cost.estimate import estimate
from ultrascale.measure.verify_dumps import DumpComparison
from ultrascale.measure.verify_engine import check_plan, verify_engine
from ultrascale.measure.verify_layouts import small_job
from ultrascale.measure.verify_megatron import RUNNER
from ultrascale.show.verify import dumps_report
from ultrascale.specs.blocks import MoE
from ultrascale.specs.errors import SpecError
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan

torch.set_num_threads(1)
Patch = pytest.MonkeyPatch
Run = Callable[..., tuple[int, str, str]]
LLAMA = Model(name="llama", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=256)
MIXTRAL = LLAMA.model_copy(update={"name": "mixtral", "ffn": 0, "moe": MoE(experts=8, top_k=2, expert_ffn=16)})
INTERLEAVED = {"pp": 2, "gas": 4, "mbs": 1, "schedule": "interleaved", "virtual_stages": 2}

runs_megatron = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is in dev-slow")


def compared(fields: dict[str, Any], shape: Model = LLAMA) -> DumpComparison:
    layout = Layout(**{"mbs": 2, **fields})
    model = shape.model_copy(update={"layers": max(2, layout.pp * layout.virtual_stages)})
    return verify_engine(RUNNER, small_job(model, layout.gpus, 32, layout.dp * layout.mbs * layout.gas), layout)


LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "ddp": {"dp": 2, "gas": 2},
    "distributed optimizer": {"dp": 2, "zero": 1},
    "tp": {"tp": 2},
    "tp without sp": {"tp": 2, "sequence_parallel": False},
    "tp x ddp": {"tp": 2, "dp": 2, "gas": 2},
    "tp x distributed optimizer": {"tp": 2, "dp": 2, "zero": 1},
    "pp": {"pp": 2, "gas": 4},
    "pp interleaved": INTERLEAVED,
    "pp x tp": {"pp": 2, "tp": 2, "gas": 2},
    "pp x distributed optimizer": {"pp": 2, "dp": 2, "zero": 1, "gas": 2},
}


@pytest.mark.slow
@runs_megatron
@pytest.mark.parametrize("name", LAYOUTS)
def test_megatron_computes_what_our_engine_computes(name: str) -> None:
    found = compared(LAYOUTS[name])
    assert found.ok, list(dumps_report(found))
    layers = 4 if "interleaved" in name else 2
    assert found.compared == {
        "weight": 3 + 9 * layers,
        "forward": 3 + 13 * layers,
        "loss": 1,
        "backward": 3 + 13 * layers,
        "gradient": 3 + 9 * layers,
    }
    assert not found.only_second
    assert found.measured_bounds


MOE_LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp": {"tp": 2},
    "ep": {"dp": 2, "ep": 2},
    "ep by all-gather": {"dp": 2, "ep": 2, "gas": 2, "dispatcher": "allgather"},
    "ep x distributed optimizer": {"dp": 4, "ep": 2, "zero": 1},
    "ep x tp": {"dp": 2, "tp": 2, "ep": 2},
    "ep x tp by all-gather": {"dp": 2, "tp": 2, "ep": 2, "zero": 1, "dispatcher": "allgather"},
    "ep x pp": {"dp": 2, "pp": 2, "ep": 2, "gas": 2},
}


@pytest.mark.slow
@runs_megatron
@pytest.mark.parametrize("name", MOE_LAYOUTS)
def test_megatron_s_experts_compute_what_ours_compute(name: str) -> None:
    found = compared(MOE_LAYOUTS[name], MIXTRAL)
    assert found.ok, list(dumps_report(found))
    assert found.compared == {"weight": 23, "forward": 23, "loss": 1, "backward": 23, "gradient": 23}
    assert set(found.only_second) == {f"forward/blocks.{layer}.mlp.router.weights" for layer in (0, 1)}
    assert found.measured_bounds


TIED = LLAMA.model_copy(update={"name": "tied", "tied_embeddings": True})
SIGMOID = MIXTRAL.model_copy(
    update={"moe": MoE(experts=8, top_k=2, expert_ffn=16, router="sigmoid", router_bias=True, scaling=2.5)}
)


@pytest.mark.slow
@runs_megatron
@pytest.mark.parametrize("fields", [{"tp": 2}, {"pp": 2, "tp": 2, "gas": 2}, {"dp": 2, "zero": 1}], ids=str)
def test_megatron_s_tied_embeddings_compute_what_ours_compute(fields: dict[str, Any]) -> None:
    """Under pp its last stage has a copy of them, whose gradient is reduced with the first stage's."""
    found = compared(fields, TIED)
    assert found.ok, list(dumps_report(found))
    assert found.compared == {"weight": 20, "forward": 29, "loss": 1, "backward": 29, "gradient": 20}


@pytest.mark.slow
@runs_megatron
def test_megatron_s_sigmoid_router_computes_what_ours_computes() -> None:
    found = compared({"dp": 2, "tp": 2, "ep": 2}, SIGMOID)
    assert found.ok, list(dumps_report(found))
    assert found.compared == {"weight": 23, "forward": 23, "loss": 1, "backward": 23, "gradient": 23}


@dataclass(frozen=True)
class Fault:
    plant: Callable[[Patch], None]
    layout: dict[str, Any]
    says: str
    """a pattern of the report, from the first difference on"""
    model: Model = LLAMA


def with_attribute(patch: Patch, owner: Any, name: str, value: Any) -> None:
    """Every new instance of a class has another value of an attribute."""
    original = owner.__init__

    def changed(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        setattr(self, name, value)

    patch.setattr(owner, "__init__", changed)


def norm_gradients_not_reduced(patch: Patch) -> None:
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")  # a function has its name too
    patch.setattr(module, "_allreduce_non_tensor_model_parallel_grads", lambda *arguments, **named: None)


def row_parallel_not_reduced(patch: Patch) -> None:
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    with_attribute(patch, RowParallelLinear, "explicit_expert_comm", True)


def column_parallel_not_reduced(patch: Patch) -> None:
    """Each rank's part of the gradient by the input is taken for the whole."""
    from megatron.core.tensor_parallel import layers

    with_attribute(patch, layers.ColumnParallelLinear, "allreduce_dgrad", False)
    patch.setattr(layers, "copy_to_tensor_model_parallel_region", lambda x, group=None: x)


def data_parallel_not_averaged(patch: Patch) -> None:
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket

    with_attribute(patch, _ParamAndGradBucket, "gradient_scaling_factor", 1.0)


def batched_sends(patch: Patch) -> None:
    """Sends and receives of both neighbours in one batch, where two ranks are each other's both neighbours."""
    from megatron.core.transformer import transformer_config

    original = transformer_config.TransformerConfig.__post_init__

    def batched(self: Any) -> None:
        self.overlap_p2p_comm, self.batch_p2p_comm = False, True
        original(self)

    patch.setattr(transformer_config.TransformerConfig, "__post_init__", batched)


def tokens_in_order_of_ranks(patch: Patch) -> None:
    """The tokens that other ranks sent are taken as if they came sorted by expert, not by rank."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    with_attribute(patch, MoEAlltoAllTokenDispatcher, "sort_input_by_local_experts", torch.arange(8))


def router_gradients_not_reduced(patch: Patch) -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    original = TopKRouter.reset_parameters

    def changed(self: Any) -> None:
        original(self)
        self.weight.sequence_parallel = False

    patch.setattr(TopKRouter, "reset_parameters", changed)


def experts_reduced_over_all_data_ranks(patch: Patch) -> None:
    """Gradients of other ranks' experts are added, as if every data rank had the same."""
    from megatron.core import distributed

    class AllAlike(distributed.DistributedDataParallel):  # type: ignore[misc]
        def __init__(self, config: Any, sharded: Any, module: Any) -> None:
            for parameter in module.parameters():
                parameter.allreduce = True
            super().__init__(config, sharded, module)

    patch.setattr(distributed, "DistributedDataParallel", AllAlike)


NOT_REDUCED = "differ between ranks over tp, and their sum is right: they were not reduced"
FAULTS = {
    "norm gradients not reduced": Fault(
        norm_gradients_not_reduced,
        {"tp": 2},
        rf"gradient of head\.norm\.weight .* {NOT_REDUCED}.*parameter gradients: 5 of 21 differ",
    ),
    "row-parallel output not reduced": Fault(
        row_parallel_not_reduced,
        {"tp": 2, "sequence_parallel": False},
        rf"forward output of blocks\.0\.attention\.out .* {NOT_REDUCED}",
    ),
    "column-parallel input gradient not reduced": Fault(
        column_parallel_not_reduced,
        {"tp": 2, "sequence_parallel": False},
        rf"gradient by the output of head\.norm .* {NOT_REDUCED}",
    ),
    "data parallelism sums": Fault(
        data_parallel_not_averaged,
        {"dp": 2},
        r"gradient of head\.linear\.weight .* Every entry is 2 times the other's \(the size of dp\)"
        r".*parameter gradients: 21 of 21 differ; each by the same factor",
    ),
    "sends of two ranks in one batch": Fault(
        batched_sends,
        INTERLEAVED,
        r"forward output of blocks\.1\.attention_norm .* its second half",
    ),
    "tokens in the order of ranks": Fault(
        tokens_in_order_of_ranks, {"dp": 2, "ep": 2}, r"forward output of blocks\.0\.mlp ", MIXTRAL
    ),
    "router gradients not reduced": Fault(
        router_gradients_not_reduced,
        {"tp": 2},
        rf"gradient of blocks\.1\.mlp\.router\.weight .* {NOT_REDUCED}.*parameter gradients: 2 of 23 differ",
        MIXTRAL,
    ),
    "experts reduced over all data ranks": Fault(
        experts_reduced_over_all_data_ranks,
        {"dp": 2, "ep": 2},
        r"gradient of blocks\.1\.mlp\.experts\.\w+ .*parameter gradients: 6 of 23 differ",
        MIXTRAL,
    ),
}


@pytest.mark.slow
@runs_megatron
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_megatron_is_found_and_named(name: str, monkeypatch: Patch) -> None:
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    text = " ".join(line.strip() for line in dumps_report(compared(fault.layout, fault.model)))
    assert re.search(rf"first difference: step 1, {fault.says}", text), text


@pytest.mark.slow
@runs_megatron
def test_the_command_verifies_a_plan_of_full_size(run: Run, tmp_path: Path) -> None:
    model, layout = Model.load("llama-3.1-8b"), Layout(tp=2, pp=2, gas=2)
    job = small_job(model, 4, 8192, 2)
    Plan(job=job, layout=layout, estimate=estimate(job, layout)).save(tmp_path / "plan.yaml")
    code, out, err = run("verify", "--engine", "megatron", tmp_path / "plan.yaml", "--json", tmp_path / "out.json")
    assert code == 0, err
    assert "note: 2 layers instead of 32" in err
    assert "megatron, 4 ranks (pp2 tp2)" in out
    assert max(map(len, out.splitlines())) <= 80
    assert '"ok": true' in (tmp_path / "out.json").read_text()


WEIGHED = {"moe": MoE(experts=8, top_k=2, expert_ffn=16, router="sigmoid", renormalize=False)}
BIASED = {"moe": MoE(experts=8, top_k=2, expert_ffn=16, router_bias=True)}


@pytest.mark.parametrize(
    ("model", "layout", "says"),
    [
        (MIXTRAL, {"tp": 2, "sequence_parallel": False}, r"layout\.sequence_parallel is False .* try sequence_parallel=true"),
        (MIXTRAL, {"dp": 2, "ep": 2, "dispatcher": "deepep"}, r"layout\.dispatcher is deepep .* try dispatcher=alltoall"),
        (MIXTRAL.model_copy(update=WEIGHED), {}, r"model\.moe\.renormalize is false .* try true"),
        (MIXTRAL.model_copy(update=BIASED), {}, r"model\.moe\.router_bias is true .* try router: sigmoid"),
        (LLAMA.model_copy(update={"qk_norm": True}), {}, r"model\.qk_norm is True .* runs its Llama and Mixtral only"),
        (
            LLAMA,
            {"cp": 2},
            r"layout\.cp is 2 but --engine megatron has context parallelism in Transformer Engine only: try cp=1",
        ),
        (LLAMA, {"dp": 2, "zero": 3}, r"layout\.zero is 3 .* try zero=1"),
        (LLAMA, {"recompute": "full"}, r"layout\.recompute is full .* try recompute=none"),
        (LLAMA, {"pp": 2, "gas": 4, "schedule": "afab"}, r"layout\.schedule is afab .* try schedule=1f1b"),
        (LLAMA, {"pp": 3, "gas": 4}, r"layout\.pp is 3 but --engine megatron needs stages of as many layers each, of 2"),
    ],
)
def test_what_megatron_does_not_run_is_refused(model: Model, layout: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        check_plan(RUNNER, small_job(model, 16), Layout(**layout))
