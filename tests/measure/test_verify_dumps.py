"""`verify --dump`: equal programs are equal, faults in a script's parallelism are found and named, bad dumps refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dump_programs as programs
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ultrascale.measure.dump import Dump, plain_name
from ultrascale.measure.dump_names import NameMap, match, our_name
from ultrascale.measure.dump_tensors import DumpStep
from ultrascale.measure.verify_dumps import compare_dumps
from ultrascale.show.verify import dumps_report
from ultrascale.specs.errors import SpecError

torch.set_num_threads(1)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dumps")
    programs.one_process(folder / "one")
    return folder / "one"


def report(first: Path, second: Path, **options: Any) -> str:
    return " ".join(line.strip() for line in dumps_report(compare_dumps(first, second, **options)))


@pytest.mark.parametrize(
    ("program", "world"),
    [
        (programs.ddp, 2),
        (programs.fsdp, 2),
        (programs.tensor_by_hand, 2),
        (programs.fsdp_and_tensor, 4),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_parallel_programs_equal_one_process(program: Any, world: int, reference: Path, tmp_path: Path) -> None:
    programs.ranks(program, world, tmp_path / "a")
    found = compare_dumps(tmp_path / "a", reference)
    assert found.ok, found.differences
    assert found.compared == {"weight": 13, "forward": 12, "loss": 1, "backward": 12, "gradient": 13}
    assert not found.only_first
    assert not found.only_second
    assert found.excess < 0.5


FAULTS = {
    "reduced twice": (
        programs.ddp,
        r"gradient of head\.bias .* Every entry is 2 times the other's \(the size of dp\)\. "
        r"parameter gradients: 13 of 13 differ; each by the same factor",
    ),
    "other rows": (programs.ddp, r"forward output of embed .* in another order along dimension 0 of 3"),
    "no all-reduce": (
        programs.tensor_by_hand,
        r"forward output of layers\.1\.mlp\.down off .* over tp, and their sum is right: they were not reduced",
    ),
    "no all-reduce in backward": (
        programs.tensor_by_hand,
        r"gradient by the output of layers\.0\.norm off .* over tp, and their sum is right: they were not reduced",
    ),
    "wrong shard of down": (
        programs.tensor_by_hand,
        r"weight of layers\.1\.mlp\.down\.weight off .* The same entries stand in another order along dimension 1 of 2",
    ),
    "one rank's norm": (
        programs.tensor_by_hand,
        r"forward output of layers\.0\.norm off .* is 1\.01 times the other's\. Only ranks with tp=1 differ\.",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_script_is_found_and_named(fault: str, reference: Path, tmp_path: Path) -> None:
    program, says = FAULTS[fault]
    programs.ranks(program, 2, tmp_path / "a", fault)
    text = report(tmp_path / "a", reference)
    assert re.search(rf"first difference: step 1, {says}", text), text


EXPERT_FAULTS = {
    "": "",
    "rows taken as sorted": r"forward output of layers\.0\.mlp off ",
    "expert gradients summed": r"gradient of layers\.1\.mlp\.weight off .* is 2 times the other's \(the size of dp\)\. "
    r"parameter gradients: 2 of 11 differ",
}


@pytest.mark.parametrize("fault", EXPERT_FAULTS)
def test_a_fault_in_expert_parallelism_is_found_and_named(fault: str, tmp_path: Path) -> None:
    programs.experts_in_one_process(tmp_path / "one")
    programs.ranks(programs.experts_by_hand, 2, tmp_path / "a", fault)
    found = compare_dumps(tmp_path / "a", tmp_path / "one")
    assert found.ok == (not fault)
    assert found.compared == {"weight": 11, "forward": 10, "loss": 1, "backward": 10, "gradient": 11}
    text = report(tmp_path / "a", tmp_path / "one")
    assert not fault or re.search(rf"first difference: step 1, {EXPERT_FAULTS[fault]}", text), text


def test_the_command_exits_by_the_answer_and_writes_json(run: Run, reference: Path, tmp_path: Path) -> None:
    programs.one_process(tmp_path / "same")
    programs.one_process(tmp_path / "other", change=lambda model: model.head.weight.data[3].mul_(3))
    code, out, err = run("verify", "--dump", tmp_path / "same", "--against", reference)
    assert (code, err) == (0, "")
    assert "ok 0 " in out
    code, out, err = run("verify", "--dump", tmp_path / "other", "--against", reference, "--json", tmp_path / "out.json")
    assert code == 1
    assert max(map(len, out.splitlines())) <= 80 or str(tmp_path) in out
    found = json.loads((tmp_path / "out.json").read_text())
    first = found["differences"][0]
    assert (first["section"], first["name"], round(first["factor"], 4)) == ("weight", "head.weight", 3)
    assert "Only entry 3 of 32 in dimension 0 of 2." in " ".join(out.split())
    assert not found["ok"]
    assert run("verify", "--dump", reference)[0] == 2
    assert run("verify", "--world", "2", "--against", reference)[0] == 2


def test_bounds_are_measured_with_a_perturbed_run(reference: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        programs.one_process(tmp_path / str(seed), perturb=seed)
    programs.ranks(programs.fsdp, 2, tmp_path / "a")
    found = compare_dumps(tmp_path / "a", reference, perturbed=[tmp_path / "1", tmp_path / "2"])
    assert found.ok
    assert found.measured_bounds
    assert 0 < found.excess < 0.5
    moved = compare_dumps(tmp_path / "1", reference)
    assert 0.01 < moved.excess <= 1


# -------------------------------------------------------------------------------------------- parts, ranks in one process


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()


def save(folder: Path, parts: list[tuple[dict[str, tuple[int, int]], list[Tensor]]], activations: str) -> None:
    """Ranks that each give their tensors to a module."""
    for rank, (mesh, tensors) in enumerate(parts):
        model = Parts()
        dump = Dump(model, folder, mesh=mesh, activations=activations, rank=rank, world=len(parts))
        with dump.step(7):
            for tensor in tensors:
                model.inner(tensor)


def saved(folder: Path, parts: list[tuple[dict[str, tuple[int, int]], list[Tensor]]], activations: str) -> Tensor:
    """The whole output of that module."""
    save(folder, parts, activations)
    return DumpStep.open(folder, 7).whole("forward/inner").tensor


WHOLE = torch.arange(2 * 8 * 4, dtype=torch.float32).reshape(2, 8, 4)


def test_zigzag_and_sequence_parallel_parts_are_joined(tmp_path: Path) -> None:
    slices = WHOLE.chunk(4, 1)
    own = [torch.cat([slices[0], slices[3]], 1), torch.cat([slices[1], slices[2]], 1)]
    parts = [
        ({"cp": (cp, 2), "tp": (tp, 2)}, [own[cp].chunk(2, 1)[tp]]) for cp in range(2) for tp in range(2)
    ]  # tp cuts what cp has cut
    assert torch.equal(saved(tmp_path, parts, "cp:1:zigzag tp:1"), WHOLE)


def test_microbatches_are_joined_in_either_order(tmp_path: Path) -> None:
    rows = [torch.full((1, 3), float(number)) for number in range(4)]
    ranks = [({"dp": (0, 2)}, rows[:2]), ({"dp": (1, 2)}, rows[2:])]
    assert saved(tmp_path / "a", ranks, "dp:0 microbatch:0")[:, 0].tolist() == [0, 1, 2, 3]
    assert saved(tmp_path / "b", ranks, "microbatch:0 dp:0")[:, 0].tolist() == [0, 2, 1, 3]


def test_partial_sums_are_added(tmp_path: Path) -> None:
    ranks = [({"tp": (rank, 2)}, [WHOLE * (0.25 + 0.5 * rank)]) for rank in range(2)]
    assert torch.equal(saved(tmp_path, ranks, "tp:sum microbatch:0"), WHOLE)


def test_large_tensors_are_sampled_and_the_report_says_so(tmp_path: Path) -> None:
    programs.one_process(tmp_path / "whole")
    programs.one_process(tmp_path / "half", max_bytes=1000)
    programs.one_process(tmp_path / "wrong", max_bytes=500, change=lambda model: model.head.weight.data[8:].mul_(2))
    text = report(tmp_path / "half", tmp_path / "whole")
    assert "ok 0 " in text
    assert re.search(r"note: \d+ of them by a sample of their entries", text)
    files = [(tmp_path / name / "step-000001" / "rank-0000.safetensors").stat().st_size for name in ("whole", "half", "wrong")]
    assert files == sorted(files, reverse=True)
    assert "first difference: step 1, weight of head.weight" in report(tmp_path / "wrong", tmp_path / "half")


def test_recomputation_is_not_recorded_twice(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    dump = Dump(model, tmp_path)
    with dump.step(1):
        checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=False).sum().backward()
    step = DumpStep.open(tmp_path, 1)
    assert [len(pieces) for key, pieces in step.pieces.items() if key.startswith("forward/")] == [1, 1, 1]
    assert step.whole("gradient/0.weight").tensor.abs().sum() > 0


# ------------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("model.layers.3.self_attn.o_proj.weight", "blocks.3.attention.out.weight"),
        ("model.layers.12", "blocks.12"),
        ("lm_head.weight", "head.linear.weight"),
        ("layers.0.feed_forward.w2", "blocks.0.mlp.down"),
        ("tok_embeddings.weight", "embed.tokens.weight"),
        ("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", "blocks.1.mlp_norm.weight"),
        ("decoder.final_layernorm.weight", "head.norm.weight"),
        ("layers.0.attention.wq.weight", "layers.0.attention.wq.weight"),
        ("conv1", "conv1"),
    ],
)
def test_names_of_engines(theirs: str, ours: str) -> None:
    assert our_name(theirs) == ours


def test_names_by_a_map_and_the_rest_listed(tmp_path: Path) -> None:
    names = NameMap.of({"net.layers.{}.*": "h.{}.*"})
    found = match(["forward/net.layers.2.fc", "forward/extra", "loss"], ["forward/h.2.fc", "loss", "weight/z"], names)
    assert found.pairs == {"forward/h.2.fc": "forward/net.layers.2.fc", "loss": "loss"}
    assert (found.only_first, found.only_second) == (("forward/extra",), ("weight/z",))
    (tmp_path / "map.yaml").write_text("a: [1]\n")
    with pytest.raises(SpecError, match=r"map\.a is .* must be a name"):
        NameMap.load(tmp_path / "map.yaml")
    with pytest.raises(SpecError, match="on the right"):
        NameMap.of({"a": "*"})


def test_a_renamed_program_is_compared_by_a_map(run: Run, reference: Path, tmp_path: Path) -> None:
    model, x, y = programs.make()
    outer = nn.Module()
    outer.net = model
    dump = Dump(outer, tmp_path / "a")
    with dump.step(1):
        loss = programs.loss_of(model, x, y)
        dump.loss(loss)
        loss.backward()
    code, _, err = run("verify", "--dump", tmp_path / "a", "--against", reference)
    assert code == 2
    assert "no names in common, such as net." in err
    (tmp_path / "map.yaml").write_text("'net.*': '*'\n")
    code, out, _ = run("verify", "--dump", tmp_path / "a", "--against", reference, "--map", tmp_path / "map.yaml")
    assert code == 0
    assert "only the first has 2 tensors: forward/net, backward/net" in " ".join(out.split())


def test_names_of_wrappers_are_left_out() -> None:
    assert plain_name("module.layers.0._checkpoint_wrapped_module.mlp") == "layers.0.mlp"
    assert plain_name("_orig_mod.module") == ""
    assert plain_name("submodule.fc") == "submodule.fc"


# --------------------------------------------------------------------------------------------------------------- bad input


def broken(tmp_path: Path, reference: Path, kind: str) -> tuple[Path, Path]:
    """A dump that cannot be compared, and the other."""
    a, other = tmp_path / "a", tmp_path / "other"
    if kind == "another step":
        programs.one_process(a, step=3)
    elif kind == "another model":
        programs.one_process(a, change=lambda model: setattr(model, "head", nn.Linear(programs.WIDTH, 40)))
    elif kind == "no placements":
        programs.ranks(programs.tensor_by_hand, 2, a, kind)
    elif kind == "missing rank":
        save(a, [({"dp": (rank, 2)}, [WHOLE]) for rank in range(2)], "dp:0")
        (a / "step-000007" / "rank-0001.json").unlink()
    elif kind == "other shapes":
        save(a, [({"tp": (rank, 2)}, [WHOLE[:, : 2 + rank]]) for rank in range(2)], "tp:0")
        save(other, [({}, [WHOLE])], "microbatch:0")
        return a, other
    elif kind == "uneven copies":
        save(a, [({"tp": (rank, 2)}, [WHOLE[:, : 2 + rank]]) for rank in range(2)], "microbatch:0")
        save(other, [({}, [WHOLE])], "microbatch:0")
        return a, other
    elif kind == "empty":
        a.mkdir()
    elif kind != "no folder":
        shutil.copytree(reference, a)
        name = {"truncated tensors": "rank-0000.safetensors", "truncated index": "rank-0000.json"}.get(kind, "rank-0000.json")
        file = a / "step-000001" / name
        content = file.read_bytes()
        changed = HOSTILE.get(kind, (b"", b""))
        assert changed[0] in content
        file.write_bytes(content[: len(content) // 2] if "truncated" in kind else content.replace(*changed))
    return a, reference


HOSTILE = {
    "no world": (b'"world":1', b'"world":0'),
    "unknown section": (b'"weight/head.bias"', b'"wight/head.bias"'),
    "unknown format": (b'"dtype":"float32"', b'"dtype":"nn"'),
    "no such dimension": (b'"dim":0', b'"dim":9'),
    "another tensor": (b'"tensor":"3"', b'"tensor":"4"'),
}
BROKEN = {
    "another step": r"has step 3 and dump .* has step 1, and none in common: record the same",
    "another model": r"weight/head\.weight of shape \[40, 16\] .* of \[32, 16\]: these are different models, or Dump needs",
    "no placements": r"weight/layers\.0\.mlp\.up\.weight of shape \[16, 16\] .* or Dump needs placements=",
    "missing rank": r"has 1 of 2 ranks in step 7: copy the files of rank 1",
    "other shapes": r"parts of forward/inner over tp have shapes \[2, 2, 4\] and \[2, 3, 4\].*give Dump its placement",
    "uneven copies": r"copies of forward/inner have shapes \[2, 2, 4\] and \[2, 3, 4\], so they are parts",
    "empty": r"has no steps: name a folder",
    "no folder": r"is no folder: name one",
    "truncated tensors": r"bytes but its index says .*: copy it again",
    "truncated index": r"is not JSON",
    "unknown section": r"key",
    "unknown format": r"dtype",
    "no such dimension": r"has no dimension 9: give Dump a placement that it has",
    "another tensor": r"does not hold weight/\S+ as its index says",
    "no world": r"\.world is 0 but must be greater than 0",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_dumps_that_cannot_be_compared_are_refused_in_a_sentence(kind: str, run: Run, reference: Path, tmp_path: Path) -> None:
    a, other = broken(tmp_path, reference, kind)
    code, out, err = run("verify", "--dump", a, "--against", other, "--json", tmp_path / "out.json")
    assert (code, out) == (2, "")
    assert re.search(BROKEN[kind], err), err
    assert err.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


def test_a_hook_that_cannot_work_is_refused(tmp_path: Path, reference: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(SpecError, match=r"no mesh but 2 ranks: give a DeviceMesh"):
        Dump(model, tmp_path, rank=0, world=2)
    with pytest.raises(SpecError, match=r"must be words AXIS:DIM"):
        Dump(model, tmp_path, placements={"weight": "tp"})
    with pytest.raises(SpecError, match=r"names axis tp but mesh has dp: add tp"):
        Dump(model, tmp_path, mesh={"dp": (0, 1)}, placements={"weight": "tp:0"})
    with pytest.raises(SpecError, match=r"already has steps of rank 0"):
        Dump(model, reference)
    with pytest.raises(SpecError, match=r"loss is 'max'"):
        Dump(model, tmp_path, loss="max")


def test_a_step_that_fails_writes_nothing(tmp_path: Path) -> None:
    dump = Dump(nn.Linear(2, 2), tmp_path / "a")
    with pytest.raises(ZeroDivisionError), dump.step(1):
        raise ZeroDivisionError
    assert not (tmp_path / "a").exists()
