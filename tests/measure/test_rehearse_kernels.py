"""A GPU's kernels without a GPU: stand-ins allocate the same tensors, and a real GPU's memory is equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rehearse_layouts import job_and_layout, terms, within

from ultrascale.kernels import float8, float8_block, fused, loss, selection
from ultrascale.kernels.float8_gemm import E4M3, E5M2, Float8Weight, GemmOperand
from ultrascale.measure import rehearse_float8
from ultrascale.measure import rehearse_rank as rehearse_module
from ultrascale.measure import rehearse_world as stand_ins
from ultrascale.measure.calibrate_runs import CalibrationRun, load
from ultrascale.measure.rehearse import COMPILED, EAGER, EMULATED, engine_of, kernels_of, notes, rehearse
from ultrascale.measure.rehearse_rank import rehearse_rank
from ultrascale.model import operators
from ultrascale.model.self_attention import CausalAttention
from ultrascale.model.transformer import Transformer
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError
from ultrascale.specs.training import Training
from ultrascale.specs.units import GIB

N, H, F, HEADS, KV, D = 6, 8, 12, 4, 2, 4
CALIBRATION = Path(__file__).resolve().parents[2] / "data" / "calibration"
MEASURED = {"first": CALIBRATION / "h200_first.jsonl", "then": CALIBRATION / "h200.jsonl"}
NOT_TENSORS_GIB = 0.2  # cuBLAS's workspaces and what the allocator rounds up: no tensors
FAST = (
    "first-smollm2-360m-s2048-m2-g1-none",
    "first-llama-3.2-1b-s4096-m4-g1-none",
    "first-smollm2-1.7b-s2048-m4-g4-none",
)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16)


ROPE = (torch.randn(N, D), torch.randn(N, D))
TWINS: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "norm": (fused, lambda: (numbers(N, H), None, numbers(H), 1e-5)),
    "norm with a residual": (fused, lambda: (numbers(N, H), numbers(N, H), numbers(H), 1e-5)),
    "norm_backward": (fused, lambda: (numbers(N, H), numbers(N, H), torch.ones(N), numbers(H), numbers(N, H))),
    "rotate_back": (fused, lambda: (numbers(N, HEADS, D), numbers(N, KV, D), numbers(N, KV, D), ROPE)),
    "gate": (fused, lambda: (numbers(N, 2 * F),)),
    "gate_backward": (fused, lambda: (numbers(N, F), numbers(N, 2 * F))),
    "loss_and_gradient": (loss, lambda: (numbers(N, F), torch.zeros(N, dtype=torch.int64), torch.empty(N))),
    "shard_statistics": (loss, lambda: (numbers(N, F), torch.zeros(N, dtype=torch.int64), 0)),
    "shard_gradient": (
        loss,
        lambda: (numbers(N, F), torch.zeros(N, dtype=torch.int64), 0, torch.zeros(2, 2, N), torch.empty(N)),
    ),
    "scaled": (loss, lambda: (torch.randn(F, H), torch.ones(()), torch.bfloat16)),
    "rms_norm": (operators, lambda: (numbers(N, H), numbers(H), 1e-5)),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_stand_in_kernel_has_the_outputs_of_the_real_one(name: str) -> None:
    owner, given = TWINS[name]
    arguments, word = given(), name.split()[0]
    actual, wanted = (getattr(one, word)(*arguments) for one in (stand_ins, owner))
    one_by_one = zip(*(each if isinstance(each, tuple) else (each,) for each in (actual, wanted)), strict=True)
    assert all((one.shape, one.dtype) == (other.shape, other.dtype) for one, other in one_by_one)


SCALAR = torch.ones(())
OPERAND = GemmOperand(numbers(N, H).to(E4M3), SCALAR)
NORM = (torch.ones(N), numbers(H))
HEAD = (numbers(N, F), torch.zeros(N, dtype=torch.int64))
WEIGHT = Float8Weight(OPERAND.data, SCALAR, torch.bfloat16)
FP8_TWINS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "cast_rows": (float8_block, (numbers(N, H),)),
    "cast_rows of a gathered weight": (float8_block, (WEIGHT,)),
    "norm_cast": (float8_block, (numbers(N, H), numbers(N, H), numbers(H), 1e-5)),
    "gate_cast": (float8_block, (numbers(N, 2 * F),)),
    "cast_transposed": (float8_block, (numbers(N, H), SCALAR)),
    "cast_transposed of a gathered weight": (float8_block, (WEIGHT, SCALAR)),
    "cast_and_transpose": (float8_block, (numbers(N, H),)),
    "cast": (float8_block, (numbers(N, H), SCALAR, E5M2, NORM)),
    "transpose": (float8_block, (OPERAND,)),
    "transpose into columns": (float8_block, (OPERAND, torch.empty(H, N, dtype=E4M3))),
    "amax": (float8_block, (numbers(N, H),)),
    "norm_backward": (float8_block, (numbers(N, H), numbers(N, H), *NORM, numbers(N, H))),
    "norm_backward_cast": (float8_block, (numbers(N, H), numbers(N, H), *NORM, numbers(N, H), SCALAR)),
    "gate_backward_cast": (float8_block, (numbers(N, F), numbers(N, 2 * F), SCALAR, SCALAR)),
    "scaled_gradient": (float8, (*HEAD, torch.empty(N), torch.empty(F, N, dtype=E5M2))),
    "shard_scaled_gradient": (float8, (*HEAD, 0, torch.zeros(2, 2, N), torch.empty(N), torch.empty(F, N, dtype=E5M2))),
}


def tensors_of(value: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return (
        [(value.shape, value.dtype)] if isinstance(value, torch.Tensor) else [one for part in value for one in tensors_of(part)]
    )


@pytest.mark.parametrize("name", FP8_TWINS)
def test_a_stand_in_fp8_kernel_has_the_outputs_of_the_real_one(name: str) -> None:
    (owner, arguments), word = FP8_TWINS[name], name.split()[0]
    stand_in = {**rehearse_float8.BLOCK, **rehearse_float8.HEAD}[word]
    assert tensors_of(stand_in(*arguments)) == tensors_of(getattr(owner, word)(*arguments))


def test_a_stand_in_addmm_allocates_no_extra_tensor() -> None:
    total = torch.zeros(F, H)
    before = total.data_ptr(), total.shape
    stand_ins.accumulate_matmul(total, numbers(F, N), numbers(N, H), fresh=True)
    assert (total.data_ptr(), total.shape) == before


def test_patched_kernels_are_restored() -> None:
    before = selection.choose, fused.norm, loss.accumulate_matmul, operators.rms_norm
    with stand_ins.as_on_a_gpu():
        assert fused.norm is stand_ins.norm
        assert selection.choose is not before[0]
    assert (selection.choose, fused.norm, loss.accumulate_matmul, operators.rms_norm) == before


def test_fused_kernels_need_less_memory_than_operators() -> None:
    job, layout = job_and_layout("gqa", {"dp": 2, "gas": 2}, "fused")
    one, plain = (rehearse_rank(job, layout, 0, kernels=each) for each in ("fused", "eager"))
    assert one.memory.parameters == plain.memory.parameters
    assert one.memory.master == plain.memory.master / 2  # in halves
    assert one.memory.activations < 0.8 * plain.memory.activations
    assert sum(one.flops.values()) == sum(plain.flops.values())
    assert one.collectives == plain.collectives


@pytest.mark.parametrize(
    "fields",
    [
        {"tp": 2, "gas": 2, "recompute": "selective"},
        {"dp": 2, "gas": 2, "zero": 3, "recompute": "full"},
        {"pp": 2, "gas": 4, "schedule": "zero-bubble"},
    ],
    ids=str,
)
def test_documents_change_no_memory_of_fused_blocks(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention saves what causal attention does, which stands in for it here."""
    job, layout = job_and_layout("gqa", fields, "fused")
    plain, validate, given = CausalAttention.forward, Training.model_validate, list[object]()

    def attend(self: CausalAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: object) -> torch.Tensor:
        given.append(bias)
        return plain(self, q, k, v)

    def masked(fields: dict[str, Any]) -> Training:
        return validate({**fields, "document_mask": True})

    def documents(self: object, number: int, rows: list[int], held_out: bool) -> torch.Tensor:
        return torch.zeros(len(rows), job.seq, dtype=torch.int64)

    monkeypatch.setattr(rehearse_module, "Training", SimpleNamespace(model_validate=masked))
    monkeypatch.setattr(stand_ins.ConstantBatches, "documents", documents, raising=False)
    monkeypatch.setattr(Transformer, "_bias", lambda self, x, length, documents: ("mask",))
    monkeypatch.setattr(CausalAttention, "forward", attend)
    for stage, term in terms(job, layout, "fused"):
        if term.label == "all tensors at the peak":
            assert abs(term.difference) < 0.01, stage
    assert set(given) == {"mask"}


@pytest.mark.parametrize(
    "fields",
    [
        {"tp": 2, "gas": 2, "recompute": "selective"},
        {"tp": 2, "gas": 1, "mbs": 2},
        {"tp": 2, "dp": 2, "gas": 1, "zero": 3},
        {"tp": 2, "pp": 2, "gas": 4, "schedule": "zero-bubble"},
    ],
    ids=str,
)
def test_chunks_of_tensor_parallelism_need_no_more_memory(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    job, layout = job_and_layout("gqa", fields, "fused")
    validate, whole = Training.model_validate, rehearse_rank(job, layout, 0, kernels="fused")
    chunked = SimpleNamespace(model_validate=lambda fields: validate({**fields, "tp_chunks": 4}))
    monkeypatch.setattr(rehearse_module, "Training", chunked)
    one = rehearse_rank(job, layout, 0, kernels="fused")
    assert one.peak <= whole.peak
    assert one.flops == whole.flops
    assert one.sent("tensor") == whole.sent("tensor")
    assert one.collectives != whole.collectives  # more of them


@pytest.mark.parametrize("fields", [{"tp": 2, "mbs": 4}, {"dp": 2, "zero": 3, "gas": 2, "mbs": 8}], ids=str)
def test_linear_attention_by_kernels_has_its_law(fields: dict[str, Any]) -> None:
    """And needs less memory than operator by operator: scores of all chunks in fp32."""
    job, layout = job_and_layout("linear", fields, "fused")
    for stage, term in terms(job, layout, "fused"):
        assert within(term), (stage, term)
    one, plain = (rehearse_rank(job, layout, 0, kernels=each) for each in ("fused", "eager"))
    assert one.peak < 0.9 * plain.peak


def test_which_kernels_are_rehearsed() -> None:
    job, layout = job_and_layout("gqa", {"dp": 2}, "fused")
    assert kernels_of(job, layout, "meta") == "fused"
    assert kernels_of(job, layout, "meta", "eager") == "eager"
    cpu = job.changed(cluster=Cluster.load("2xcpu"))
    assert kernels_of(cpu, layout, "meta") == "eager"
    assert kernels_of(job.changed(precision="fp8"), layout, "meta") == "fused"
    odd, whole = job_and_layout("odd", {"precision": "fp8"}, "fused")
    assert kernels_of(odd, whole, "meta") == "eager"
    assert kernels_of(odd, whole, "cuda") == "fused"
    with pytest.raises(SpecError, match="try eager, or --device cuda"):
        kernels_of(odd, whole, "meta", "fused")
    (one,) = rehearse(job, layout)
    assert one.kernels == "fused"
    (one,) = rehearse(job, layout, kernels="eager")
    assert one.kernels == "eager"


def test_notes_name_differences_to_a_gpu() -> None:
    fused_, plain = (job_and_layout("gqa", {"dp": 2}, each) for each in ("fused", "eager"))
    assert notes(*fused_, "meta", "fused") == []
    assert notes(*plain, "meta", "eager") == [EAGER]
    assert notes(*job_and_layout("gqa", {"recompute": "full"}, "fused"), "meta", "fused") == []
    assert notes(*job_and_layout("odd", {}, "fused"), "meta", "fused") == [COMPILED]
    assert notes(*job_and_layout("gqa", {"tp": 2}, "fused"), "meta", "fused") == []  # a GPU runs it operator by operator, too
    assert notes(*fused_, "cuda", "fused") == []
    assert notes(*job_and_layout("gqa", {"tp": 2, "precision": "fp8"}, "fused"), "meta", "fused") == []
    assert EMULATED in notes(*job_and_layout("odd", {"precision": "fp8"}, "eager"), "meta", "eager")


def runs() -> list[Any]:
    """Those without full recomputation: a GPU compiles it."""
    found = []
    for name, file in MEASURED.items():
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        peaks = {line["run"]: line["measurement"]["memory"][0]["memory"] for line in lines}
        for one in (one for one in load([file]) if one.layout.recompute != "full"):
            word = f"{name}-{one.name}"
            found.append(pytest.param(one, peaks[one.name], id=word, marks=() if word in FAST else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("run", "measured_bytes"), runs())
def test_memory_equals_a_real_gpus(run: CalibrationRun, measured_bytes: dict[str, float]) -> None:
    """An H200's allocator at the peak of the same step, beside tensors that have no memory."""
    one = rehearse_rank(run.job.changed(framework=engine_of("fused")), run.layout, 0, kernels="fused")
    measured = sum(bytes_ for owner, bytes_ in measured_bytes.items() if owner != "runtime")
    compiled = COMPILED in notes(run.job, run.layout, "meta", "fused")  # operators have larger temporaries than it has
    assert -compiled * 0.002 * measured <= measured - one.peak <= NOT_TENSORS_GIB * GIB
    for owner in ("parameters", "master", "gradients", "optimizer"):
        assert getattr(one.memory, owner) == pytest.approx(measured_bytes[owner], rel=2e-3), owner
