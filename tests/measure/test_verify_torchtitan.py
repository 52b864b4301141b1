"""`verify --engine torchtitan`: its parallel code computes what our engine computes, and faults planted into it are named."""

from __future__ import annotations

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
from ultrascale.measure.verify_torchtitan import RUNNER
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
QWEN = LLAMA.model_copy(update={"name": "qwen", "qk_norm": True})
EXPERTS = MoE(experts=8, top_k=2, expert_ffn=16)
QWEN_MOE = QWEN.model_copy(update={"name": "qwen-moe", "ffn": 0, "moe": EXPERTS})
SIGMOID = QWEN_MOE.model_copy(
    update={"moe": EXPERTS.model_copy(update={"router": "sigmoid", "router_bias": True, "scaling": 2.5})}
)
TIED = LLAMA.model_copy(update={"tied_embeddings": True})


runs_torchtitan = pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is in dev-slow")


def compared(fields: dict[str, Any], model: Model = LLAMA) -> DumpComparison:
    layout = Layout(**{"mbs": 2, **fields})
    return verify_engine(RUNNER, small_job(model, layout.gpus, 32, layout.dp * layout.mbs * layout.gas), layout)


LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 2},
    "fsdp": {"dp": 2, "zero": 3, "gas": 2},
    "hsdp": {"dp": 4, "zero": 3, "zero_shards": 2},
    "tp": {"tp": 2},
    "tp without sp": {"tp": 2, "sequence_parallel": False},
    "cp zigzag": {"cp": 2},
    "cp": {"cp": 2, "context_parallel": "allgather"},
    "pp": {"pp": 2, "gas": 4},
    "pp interleaved": {"pp": 2, "gas": 4, "mbs": 1, "schedule": "interleaved", "virtual_stages": 2},
    "cp of one sequence": {"cp": 2, "mbs": 1},
    "cp x tp": {"cp": 2, "tp": 2},
    "cp x tp without sp": {"cp": 2, "tp": 2, "sequence_parallel": False, "context_parallel": "allgather"},
    "recompute": {"dp": 2, "zero": 3, "recompute": "full"},
    "fsdp x tp": {"dp": 2, "tp": 2, "zero": 3},
    "pp x tp": {"pp": 2, "tp": 2, "gas": 2},
    "pp x fsdp": {"pp": 2, "dp": 2, "zero": 3, "gas": 2},
}


@pytest.mark.slow
@runs_torchtitan
@pytest.mark.parametrize("name", LAYOUTS)
def test_torchtitan_computes_what_our_engine_computes(name: str) -> None:
    model = LLAMA.model_copy(update={"layers": 4}) if "interleaved" in name else LLAMA
    found = compared(LAYOUTS[name], model)
    assert found.ok, list(dumps_report(found))
    layers = model.layers
    assert found.compared == {
        "weight": 3 + 9 * layers,
        "forward": 3 + 11 * layers,
        "loss": 1,
        "backward": 3 + 11 * layers,
        "gradient": 3 + 9 * layers,
    }
    assert found.measured_bounds


MOE_LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"dp": 2, "zero": 3, "gas": 2},
    "tp": {"tp": 2},
    "tp without sp": {"tp": 2, "sequence_parallel": False},
    "ep": {"dp": 2, "zero": 3, "ep": 2},
    "ep x recompute": {"dp": 2, "zero": 3, "ep": 2, "recompute": "full"},
    "ep in cp": {"cp": 2, "zero": 3, "ep": 2},
    "ep in hsdp": {"dp": 4, "zero": 3, "zero_shards": 2, "ep": 2},
    "fsdp x ep": {"dp": 4, "zero": 3, "ep": 2},
    "fsdp x tp": {"dp": 2, "tp": 2, "zero": 3},
    "ep x tp": {"dp": 2, "tp": 2, "zero": 3, "ep": 2},
    "cp x tp x ep": {"cp": 2, "tp": 2, "zero": 3, "ep": 2},
    "ep x pp": {"dp": 2, "pp": 2, "zero": 3, "ep": 2, "gas": 2},
}


@pytest.mark.slow
@runs_torchtitan
@pytest.mark.parametrize("name", MOE_LAYOUTS)
def test_torchtitan_s_experts_compute_what_ours_compute(name: str) -> None:
    found = compared(MOE_LAYOUTS[name], QWEN_MOE)
    assert found.ok, list(dumps_report(found))
    assert found.compared == {"weight": 27, "forward": 29, "loss": 1, "backward": 27, "gradient": 27}
    assert not found.only_second
    assert found.measured_bounds


@pytest.mark.slow
@runs_torchtitan
@pytest.mark.parametrize("fields", [{"tp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_torchtitan_s_qwen_computes_what_ours_computes(fields: dict[str, Any]) -> None:
    found = compared(fields, QWEN)
    assert found.ok, list(dumps_report(found))
    assert found.compared == {"weight": 25, "forward": 33, "loss": 1, "backward": 33, "gradient": 25}
    assert not found.only_second


@pytest.mark.slow
@runs_torchtitan
@pytest.mark.parametrize("fields", [{"tp": 2}, {"dp": 2, "zero": 3}, {"dp": 2, "tp": 2, "zero": 3}], ids=str)
def test_torchtitan_s_tied_embeddings_compute_what_ours_compute(fields: dict[str, Any]) -> None:
    found = compared(fields, TIED)
    assert found.ok, list(dumps_report(found))
    assert found.compared == {"weight": 20, "forward": 25, "loss": 1, "backward": 25, "gradient": 20}


@pytest.mark.slow
@runs_torchtitan
@pytest.mark.parametrize("fields", [{"tp": 2}, {"dp": 2, "zero": 3, "ep": 2}], ids=str)
def test_torchtitan_s_sigmoid_router_computes_what_ours_computes(fields: dict[str, Any]) -> None:
    found = compared(fields, SIGMOID)
    assert found.ok, list(dumps_report(found))
    assert found.compared == {"weight": 27, "forward": 29, "loss": 1, "backward": 27, "gradient": 27}


@dataclass(frozen=True)
class Fault:
    plant: Callable[[Patch], None]
    layout: dict[str, Any]
    says: str
    """a pattern of the report, from the first difference on"""
    model: Model = LLAMA


def wrapped(patch: Patch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """`around(original, *arguments)` in the place of `owner.name`."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *arguments, **named: around(original, *arguments, **named))


def norm_gradients_not_reduced(patch: Patch) -> None:
    """The norm's weight says that its gradient is whole on each tensor-parallel rank, though each saw its own positions."""
    import torch.nn.functional as F
    from torch.distributed.tensor import DTensor
    from torchtitan.models.common.nn_modules import RMSNorm

    def forward(self: Any, x: DTensor) -> DTensor:
        local = F.rms_norm(x.to_local(), self.normalized_shape, self.weight.to_local(), self.eps)
        return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False)

    patch.setattr(RMSNorm, "forward", forward)


def wo_not_reduced(patch: Patch) -> None:
    """Each rank takes its own part of the sum for the whole."""
    from torch.distributed.tensor import DTensor, Replicate
    from torchtitan.protocols.module import Module

    def around(original: Any, self: Any, dims: Any, output: Any) -> Any:
        if tuple(getattr(getattr(self, "weight", None), "shape", ())) != (32, 32):
            return original(self, dims, output)
        taken = [Replicate() if one.is_partial() else one for one in output.placements]
        return DTensor.from_local(output.to_local(), output.device_mesh, taken, run_check=False)

    wrapped(patch, Module, "_redistribute_outputs", around)


def wrong_shard_of_wo(patch: Patch) -> None:
    from torchtitan.protocols import module

    def around(original: Any, tensor: Any, mesh: Any, placements: Any) -> Any:
        is_wo = tuple(tensor.shape) == (32, 32) and any(one.is_shard(1) for one in placements)
        return original(torch.nn.Parameter(tensor.detach().roll(16, 1)) if is_wo else tensor, mesh, placements)

    wrapped(patch, module, "distribute_tensor", around)


def divided_twice(patch: Patch) -> None:
    """The loss is divided by the tokens of all ranks, and FSDP takes the mean over ranks again."""
    from torchtitan.distributed import fsdp

    patch.setattr(fsdp, "disable_fsdp_gradient_division", lambda model: None)


def local_positions(patch: Patch) -> None:
    from torchtitan import trainer

    def around(original: Any, *arguments: Any) -> Any:
        inputs, labels, named = original(*arguments)
        named["positions"] = torch.arange(inputs.shape[1]).expand(inputs.shape[0], -1).contiguous()
        return inputs, labels, named

    wrapped(patch, trainer, "prepare_context_parallel_input", around)


def pipeline_scales_gradients(patch: Patch) -> None:
    """The mean over micro-batches of a loss that is divided by the tokens of all of them."""
    from torchtitan.distributed import pipeline_parallel

    def around(original: Any, name: str) -> Any:
        kind = original(name)
        return type(
            kind.__name__, (kind,), {"__init__": lambda self, *a, **n: kind.__init__(self, *a, **{**n, "scale_grads": True})}
        )

    wrapped(patch, pipeline_parallel, "get_schedule_class", around)


def tokens_in_order_of_ranks(patch: Patch) -> None:
    """The tokens that other ranks sent are taken as if they came sorted by expert, not by rank."""
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    def around(original: Any, self: Any, rows: Any, counts: Any) -> Any:
        shape, _, indices, sums = original(self, rows, counts)
        return shape, rows, torch.arange(len(indices)), sums

    wrapped(patch, AllToAllTokenDispatcher, "_permute", around)


def weights_of_other_choices(patch: Patch) -> None:
    """Outputs of experts are weighted in the order of tokens, though they stand in the order of experts."""
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    def around(original: Any, self: Any, x: Any, scores: Any, experts: Any) -> Any:
        rows, tokens, _ = original(self, x, scores, experts)
        return rows, tokens, scores.view(-1)

    wrapped(patch, LocalTokenDispatcher, "_local_reorder", around)


def expert_gradients_not_reduced(patch: Patch) -> None:
    """Copies of experts get the gradients of their own replica's tokens."""
    from torchtitan.distributed import ParallelDims

    def around(original: Any, self: Any, dims: Any, **named: Any) -> Any:
        return original(self, ["efsdp"] if dims == ["dp_replicate", "efsdp"] else dims, **named)

    wrapped(patch, ParallelDims, "get_optional_mesh", around)


def returned_tokens_get_no_gradient(patch: Patch) -> None:
    """What experts return is a new tensor to autograd."""
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    wrapped(patch, AllToAllTokenDispatcher, "_dispatch_token_exchange", lambda original, *given: original(*given).detach())


FAULTS = {
    "tokens in the order of ranks": Fault(
        tokens_in_order_of_ranks, {"dp": 2, "zero": 3, "ep": 2}, r"forward output of blocks\.0\.mlp ", QWEN_MOE
    ),
    "weights of other choices": Fault(weights_of_other_choices, {"tp": 2}, r"forward output of blocks\.0\.mlp ", QWEN_MOE),
    "expert gradients not reduced": Fault(
        expert_gradients_not_reduced,
        {"dp": 4, "zero": 3, "zero_shards": 2, "ep": 2},
        r"gradient of blocks\.1\.mlp\.experts\.\w+ .* differ between ranks over dp_replicate, and their sum is right"
        r".*parameter gradients: 6 of 27 differ",
        QWEN_MOE,
    ),
    "tokens get no gradient from experts": Fault(
        returned_tokens_get_no_gradient,
        {"dp": 2, "zero": 3, "ep": 2},
        r"gradient by the output of blocks\.1\.mlp_norm ",
        QWEN_MOE,
    ),
    "norm gradients not reduced": Fault(
        norm_gradients_not_reduced,
        {"tp": 2},
        r"gradient of head\.norm\.weight .* differ between ranks over tp, and their sum is right: they were not reduced"
        r".*parameter gradients: 5 of 21 differ",
    ),
    "wo not reduced": Fault(
        wo_not_reduced, {"tp": 2, "sequence_parallel": False}, r"forward output of blocks\.0\.attention\.out "
    ),
    "wrong shard of wo": Fault(
        wrong_shard_of_wo,
        {"tp": 2},
        r"weight of blocks\.0\.attention\.out\.weight .* in another order along dimension 1 of 2",
    ),
    "divided twice": Fault(
        divided_twice,
        {"dp": 2, "zero": 3},
        r"gradient of head\.linear\.weight .* Every entry is 0\.5 times the other's \(1 over the size of dp_shard\)"
        r".*parameter gradients: 21 of 21 differ; each by the same factor",
    ),
    "positions of the rank's part": Fault(
        local_positions,
        {"cp": 2, "context_parallel": "allgather"},
        r"forward output of blocks\.0\.attention\.core .* Only ranks with cp=1 differ\..*in dimension 1 of 4, its second half",
    ),
    "pipeline scales gradients": Fault(
        pipeline_scales_gradients,
        {"pp": 2, "gas": 4},
        r"gradient of head\.linear\.weight .* Every entry is 0\.25 times the other's",
    ),
}


@pytest.mark.slow
@runs_torchtitan
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_torchtitan_is_found_and_named(name: str, monkeypatch: Patch) -> None:
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    text = " ".join(line.strip() for line in dumps_report(compared(fault.layout, fault.model)))
    assert re.search(rf"first difference: step 1, {fault.says}", text), text


@pytest.mark.slow
@runs_torchtitan
def test_the_command_verifies_a_plan(run: Run, tmp_path: Path) -> None:
    layout = Layout(tp=2, mbs=2)
    job = small_job(LLAMA, 2, 32, 2)
    Plan(job=job, layout=layout, estimate=estimate(job, layout)).save(tmp_path / "plan.yaml")
    code, out, err = run("verify", "--engine", "torchtitan", tmp_path / "plan.yaml", "--json", tmp_path / "out.json")
    assert code == 0, err
    assert "torchtitan, 2 ranks (tp2)" in out
    assert max(map(len, out.splitlines())) <= 80
    assert '"ok": true' in (tmp_path / "out.json").read_text()


@pytest.mark.slow
@runs_torchtitan
def test_a_plan_of_full_size_is_reduced(run: Run, tmp_path: Path) -> None:
    model, layout = Model.load("llama-3-8b"), Layout(tp=2, pp=2, gas=2)
    job = small_job(model, 4, 8192, 2)
    Plan(job=job, layout=layout, estimate=estimate(job, layout)).save(tmp_path / "plan.yaml")
    code, out, err = run("verify", "--engine", "torchtitan", tmp_path / "plan.yaml")
    assert code == 0, err
    assert "note: 2 layers instead of 32" in err
    assert "torchtitan, 4 ranks (pp2 tp2)" in out


@pytest.mark.parametrize(
    ("model", "layout", "says"),
    [
        ("gpt2", {}, r"model\.\S+ is .* but --engine torchtitan runs its Llama and Qwen3 only"),
        (TIED, {"pp": 2}, r"layout\.pp is 2 .* tied_embeddings: try pp=1, or tied_embeddings=false"),
        ("deepseek-v3", {}, r"model\.mla is set but --engine torchtitan .* only: try llama-3-8b"),
        ("mixtral-8x7b", {}, r"model\.qk_norm is false .* try true, or qwen3-30b-a3b"),
        ("qwen3-30b-a3b", {"dp": 2, "ep": 2}, r"layout\.ep is 2 .* from the 1 that shard weights: try zero=3"),
        ("qwen3-30b-a3b", {"dp": 2, "zero": 3, "ep": 2, "dispatcher": "deepep"}, r"layout\.dispatcher is deepep"),
        (
            "qwen3-30b-a3b",
            {"dp": 2, "tp": 2, "zero": 3, "ep": 2, "sequence_parallel": False},
            r"layout\.ep is 2 beside tp 2 without sequence parallelism .* try sequence_parallel=true",
        ),
        ("llama-3-8b", {"tp": 16}, r"layout\.tp is 16 but torchtitan needs it to divide kv_heads = 8"),
    ],
)
def test_what_torchtitan_does_not_run_is_refused(model: str | Model, layout: dict[str, Any], says: str) -> None:
    shape = Model.load(model) if isinstance(model, str) else model
    with pytest.raises(SpecError, match=says):
        check_plan(RUNNER, small_job(shape, 16), Layout(**layout))


def test_an_unknown_engine_is_refused(run: Run, tmp_path: Path) -> None:
    code, _, err = run("verify", "--engine", "nanotron", tmp_path / "plan.yaml")
    assert code == 2
    assert "must be torchtitan or megatron" in err
    assert run("verify", "--engine", "torchtitan", "--world", "2")[0] == 2
