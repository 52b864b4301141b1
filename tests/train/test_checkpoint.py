"""Saved under one layout, loaded under another: the curve is that of one process; under the same one, bitwise equal."""

from __future__ import annotations

import errno
import json
import pickle
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from parallel.harness import in_ranks, job_of, one_process, relative, training_of
from ultrascale.convert import to_hf
from ultrascale.specs.checkpointing import Checkpointing
from ultrascale.specs.errors import SpecError
from ultrascale.specs.layout import Layout
from ultrascale.train import checkpoint
from ultrascale.train.async_checkpoint import CheckpointManager, restore
from ultrascale.train.build import build_engine
from ultrascale.train.engine import Engine

BATCH, BEFORE, STEPS = 8, 2, 5
CLOSE = 1e-5
TRAINING = training_of(steps=STEPS)


def layout(**fields: Any) -> Layout:
    """Of the same eight sequences, whatever the data ranks."""
    dp, mbs = fields.get("dp", 1), fields.get("mbs", 1)
    return Layout(**{"gas": BATCH // (dp * mbs), **fields})


LAYOUTS = {
    "one": layout(mbs=8),
    "one-by-one": layout(mbs=1),
    "dp2": layout(dp=2, mbs=2),
    "dp4-naive": layout(dp=4, data_parallel="naive"),
    "tp2": layout(tp=2),
    "tp4": layout(tp=4, sequence_parallel=True),
    "tp2-plain": layout(tp=2, sequence_parallel=False),
    "cp2": layout(cp=2),
    "cp2-zero3": layout(cp=2, zero=3),
    "zero1": layout(dp=2, zero=1),
    "zero2": layout(dp=2, zero=2),
    "zero3": layout(dp=4, zero=3),
    "hsdp": layout(dp=4, zero=3, zero_shards=2),
    "pp2": layout(pp=2),
    "pp4-afab": layout(pp=4, schedule="afab"),
    "interleaved": layout(pp=2, schedule="interleaved", virtual_stages=2),
    "zb-v": layout(pp=2, schedule="zb-v", virtual_stages=2),
    "dp2-tp2": layout(dp=2, tp=2),
    "zero3-tp2": layout(dp=2, tp=2, zero=3),
    "pp2-zero1": layout(dp=2, pp=2, zero=1),
    "pp2-tp2": layout(pp=2, tp=2),
    "tp2-cp2": layout(tp=2, cp=2),
    "full": layout(dp=2, recompute="full"),
    "ep2": layout(dp=2, ep=2),
    "ep2-dp4": layout(dp=4, ep=2),
    "ep2-zero3": layout(dp=4, ep=2, zero=3),
    "ep2-hsdp": layout(dp=4, ep=2, zero=2, zero_shards=2),
    "ep2-tp2": layout(dp=2, ep=2, tp=2),
    "ep2-pp2-zero1": layout(dp=2, ep=2, pp=2, zero=1),
}
EXPERT_PAIRS = [
    ("one", "ep2"),
    ("ep2", "one"),
    ("ep2", "ep2-zero3"),
    ("ep2-zero3", "tp2"),
    ("ep2-dp4", "ep2-tp2"),
    ("ep2-tp2", "zero3"),
    ("ep2-hsdp", "ep2"),
    ("tp2", "ep2-pp2-zero1"),
    ("ep2-pp2-zero1", "cp2"),
    ("one", "tp2"),
    ("zb-v", "dp2"),
]
PAIRS = [
    ("one", "dp2"),
    ("one", "tp2"),
    ("one", "zero3"),
    ("one", "pp4-afab"),
    ("one-by-one", "cp2"),
    ("dp2", "one"),
    ("dp2", "zero1"),
    ("dp2", "tp4"),
    ("dp4-naive", "tp2"),
    ("dp4-naive", "pp2"),
    ("tp2", "tp4"),
    ("tp4", "tp2"),
    ("tp2", "tp2-plain"),
    ("tp4", "zero3"),
    ("tp4", "one"),
    ("cp2", "cp2-zero3"),
    ("cp2-zero3", "tp2-cp2"),
    ("cp2", "dp4-naive"),
    ("zero1", "zero2"),
    ("zero2", "zero3"),
    ("zero3", "zero1"),
    ("zero3", "hsdp"),
    ("hsdp", "tp2"),
    ("zero3", "pp2-zero1"),
    ("pp2", "pp4-afab"),
    ("pp4-afab", "zero3-tp2"),
    ("pp2", "interleaved"),
    ("interleaved", "zb-v"),
    ("zb-v", "one"),
    ("zb-v", "dp2-tp2"),
    ("dp2-tp2", "pp2-tp2"),
    ("zero3-tp2", "interleaved"),
    ("pp2-zero1", "zb-v"),
    ("pp2-tp2", "cp2"),
    ("tp2-cp2", "dp2"),
    ("full", "zero3-tp2"),
]


def before(engine: Engine, run: Path, steps: int = BEFORE, background: bool = True) -> list[float]:
    manager = CheckpointManager(engine, run, Checkpointing(background=background))
    losses = [engine.step(number).loss for number in range(steps)]
    manager.save(steps)
    manager.wait_for_copy()
    losses += [engine.step(number).loss for number in range(steps, STEPS)]  # the copy is done: these change nothing
    manager.finish()
    return losses


def after(engine: Engine, folder: Path) -> list[float]:
    source = checkpoint.open_checkpoint(folder)
    restore(engine, source)
    return [engine.step(number).loss for number in range(source.step, STEPS)]


@cache
def whole_curve(model: str) -> list[float]:
    return one_process(job_of(model), BATCH, TRAINING).losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Each layout trains and saves once, however many load it; the losses of the run that went on."""

    @cache
    def save(model: str, name: str) -> tuple[Path, list[float]]:
        run = tmp_path_factory.mktemp(f"{model}-{name}")
        ranks = in_ranks(before, job_of(model), LAYOUTS[name], TRAINING, run)
        return checkpoint.latest(run).folder, ranks[0]

    return save


@pytest.mark.quick_cases("zero3-pp2-zero1")
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda name: name)
def test_the_loss_curve_continues_under_another_layout(saved: Any, first: str, second: str) -> None:
    folder, _ = saved("llama", first)
    losses = in_ranks(after, job_of("llama"), LAYOUTS[second], TRAINING, folder)[0]
    assert len(losses) == STEPS - BEFORE
    assert relative(losses, whole_curve("llama")[BEFORE:]) < CLOSE


@pytest.mark.quick_cases("one-zb-v")
@pytest.mark.parametrize(
    ("first", "second"), [("one", "zb-v"), ("zb-v", "tp2"), ("pp2", "dp2"), ("tp4", "pp2-tp2"), ("zero3", "interleaved")]
)
def test_tied_embeddings_are_saved_once_and_loaded_at_both_ends(saved: Any, first: str, second: str) -> None:
    folder, _ = saved("tied", first)
    assert "head.linear.weight" not in checkpoint.open_checkpoint(folder).shapes()
    losses = in_ranks(after, job_of("tied"), LAYOUTS[second], TRAINING, folder)[0]
    assert relative(losses, whole_curve("tied")[BEFORE:]) < CLOSE


@pytest.mark.quick_cases("one-ep2")
@pytest.mark.parametrize(
    ("first", "second"), [*EXPERT_PAIRS[:5], *(pytest.param(*pair, marks=pytest.mark.slow) for pair in EXPERT_PAIRS[5:])]
)
def test_experts_and_router_biases_are_restored(saved: Any, first: str, second: str) -> None:
    folder, _ = saved("deepseek", first)
    assert checkpoint.open_checkpoint(folder).tensor("blocks.2.mlp.router.bias").any()
    losses = in_ranks(after, job_of("deepseek"), LAYOUTS[second], TRAINING, folder)[0]
    assert relative(losses, whole_curve("deepseek")[BEFORE:]) < CLOSE


@pytest.mark.quick_cases("one-zero3")
@pytest.mark.parametrize(
    ("first", "second"), [("zero3", "one"), ("one", "zero3"), ("zero3", "ep2-zero3"), ("ep2-zero3", "tp2")]
)
def test_experts_sharded_over_more_ranks_are_restored(saved: Any, first: str, second: str) -> None:
    """Two experts over four ranks: each has a slice of every matrix of one of them."""
    folder, _ = saved("two-experts", first)
    losses = in_ranks(after, job_of("two-experts"), LAYOUTS[second], TRAINING, folder)[0]
    assert relative(losses, whole_curve("two-experts")[BEFORE:]) < CLOSE


@pytest.mark.quick_cases("one", "zero3")
@pytest.mark.parametrize("name", ["one", "dp2", "tp4", "cp2", "zero3", "hsdp", "zb-v", "zero3-tp2"])
def test_the_same_layout_resumes_bitwise_equal(saved: Any, name: str) -> None:
    folder, losses = saved("llama", name)
    assert in_ranks(after, job_of("llama"), LAYOUTS[name], TRAINING, folder)[0] == losses[BEFORE:]


def test_async_checkpoints_equal_blocking_ones(tmp_path: Path) -> None:
    for background in (True, False):
        in_ranks(before, job_of("llama"), LAYOUTS["dp2"], TRAINING, tmp_path / str(background), BEFORE, background)
    beside, waited = (checkpoint.latest(tmp_path / str(background)) for background in (True, False))
    assert beside.shapes() == waited.shapes()
    for name in beside.shapes():
        assert torch.equal(beside.tensor(name), waited.tensor(name)), name


def test_weights_alone_start_a_new_run(saved: Any) -> None:
    def begin(engine: Engine, folder: Path) -> tuple[int, float]:
        restore(engine, checkpoint.open_checkpoint(folder), weights_alone=True)
        return engine.optimizer.updates, engine.step(BEFORE).loss

    folder, _ = saved("llama", "one")
    updates, loss = in_ranks(begin, job_of("llama"), LAYOUTS["tp2"], TRAINING, folder)[0]
    assert updates == 0
    assert loss == pytest.approx(whole_curve("llama")[BEFORE], rel=CLOSE)


@pytest.mark.slow
def test_sgd_momentum_is_restored(tmp_path: Path) -> None:
    for optimizer in ("sgd-momentum", "sgd"):
        job = job_of("llama", optimizer=optimizer)
        losses = in_ranks(before, job, LAYOUTS["one"], TRAINING, tmp_path / optimizer)[0]
        folder = checkpoint.latest(tmp_path / optimizer).folder
        assert in_ranks(after, job, LAYOUTS["one"], TRAINING, folder)[0] == losses[BEFORE:]
        assert relative(in_ranks(after, job, LAYOUTS["zero3"], TRAINING, folder)[0], losses[BEFORE:]) < CLOSE


@pytest.mark.parametrize("model", ["llama", pytest.param("experts", marks=pytest.mark.slow)])
def test_momentum_of_matrices_and_moments_of_the_rest_are_restored(model: str, tmp_path: Path) -> None:
    job = job_of(model, optimizer="muon")
    losses = in_ranks(before, job, LAYOUTS["zero2"], TRAINING, tmp_path)[0]
    source = checkpoint.latest(tmp_path)
    assert source.moments == ("exp_avg", "exp_avg_sq", "momentum_buffer")
    states = {name.partition(".blocks.")[0] for name in source.names if "attention.out.weight" in name}
    assert states == {"model", "optimizer.momentum_buffer"}
    assert relative(in_ranks(after, job, LAYOUTS["tp2"], TRAINING, source.folder)[0], losses[BEFORE:]) < CLOSE


@pytest.mark.parametrize("second", ["one", pytest.param("pp2-zero1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", ["adamw-bf16", "adamw-8bit"])
def test_rounded_moments_are_restored_to_the_bit(second: str, optimizer: str, tmp_path: Path) -> None:
    job = job_of("tied", optimizer=optimizer)
    losses = in_ranks(before, job, LAYOUTS["one"], TRAINING, tmp_path)[0]
    found = in_ranks(after, job, LAYOUTS[second], TRAINING, checkpoint.latest(tmp_path).folder)[0]
    assert found == losses[BEFORE:] if second == "one" else relative(found, losses[BEFORE:]) < 1e-4


def scaled(engine: Engine, run: Path) -> tuple[float, int]:
    engine.scale.value, engine.scale.good = 128.0, 3
    manager = CheckpointManager(engine, run, Checkpointing())
    engine.step(0)
    manager.save(1, wait=True)
    fresh = build_engine(engine.job, engine.mesh, engine.training, engine.batches)
    restore(fresh, checkpoint.latest(run))
    return fresh.scale.value, fresh.scale.good


def test_the_loss_scale_is_restored(tmp_path: Path) -> None:
    assert in_ranks(scaled, job_of("llama", precision="fp16"), LAYOUTS["one"], TRAINING, tmp_path) == [(128.0, 4)]


def drawn(engine: Engine, run: Path, folder: Path | None) -> list[float]:
    if folder is None:
        torch.manual_seed(100 + engine.mesh.rank)
        engine.step(0)
        CheckpointManager(engine, run, Checkpointing()).save(1, wait=True)
    else:
        torch.manual_seed(7)
        restore(engine, checkpoint.open_checkpoint(folder))
    return [float(x) for x in torch.rand(3)]


def test_random_states_are_restored(tmp_path: Path) -> None:
    first = in_ranks(drawn, job_of("llama"), LAYOUTS["dp2"], TRAINING, tmp_path, None)
    again = in_ranks(drawn, job_of("llama"), LAYOUTS["dp2"], TRAINING, tmp_path, checkpoint.latest(tmp_path).folder)
    assert again == first
    assert first[0] != first[1]


def test_the_newest_checkpoints_are_kept_and_latest_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".step-000001.partial").mkdir(parents=True)  # as a killed run leaves it
    (tmp_path / "checkpoints" / ".latest.tmp").touch()
    in_ranks(several, job_of("llama"), LAYOUTS["dp2"], TRAINING, tmp_path)
    names = [folder.name for folder in checkpoint.complete(tmp_path)]
    assert names == ["step-000003", "step-000004"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000004\n"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", *names]


def several(engine: Engine, run: Path) -> None:
    manager = CheckpointManager(engine, run, Checkpointing(keep=2))
    for number in range(4):
        engine.step(number)
        manager.save(number + 1)
        manager.wait_for_copy()
    manager.finish()


def test_torch_reads_the_files_without_us(saved: Any, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder, _ = saved("llama", "zero3")
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    ours = checkpoint.open_checkpoint(folder)
    assert state["model"].keys() == ours.shapes().keys()
    for name, tensor in state["model"].items():
        assert torch.equal(tensor, ours.tensor(name))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


@pytest.fixture
def copy_of(saved: Any, tmp_path: Path) -> Path:
    import shutil

    folder, _ = saved("llama", "dp2")
    return Path(shutil.copytree(folder, tmp_path / "checkpoints" / folder.name))


def load_all(folder: Path) -> None:
    source = checkpoint.open_checkpoint(folder)
    in_ranks(after, job_of("llama"), LAYOUTS["one"], TRAINING, source.folder)


@pytest.mark.parametrize("place", [0.0, 0.3, 0.7, 0.999])
@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "checkpoint.json"])
def test_a_flipped_bit_is_detected(copy_of: Path, name: str, place: float) -> None:
    data = bytearray((copy_of / name).read_bytes())
    data[int(place * len(data))] ^= 1
    (copy_of / name).write_bytes(data)
    if name == "checkpoint.json" and place == 0.999:
        data[-2] ^= 1  # the last byte is a newline: the one before it closes the mapping
        (copy_of / name).write_bytes(data)
    with pytest.raises(SpecError, match=r"damaged|not JSON|not text|says format"):
        load_all(copy_of)


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["cut", "missing", "empty"])
def test_a_truncated_file_is_detected(copy_of: Path, name: str, damage: str) -> None:
    path = copy_of / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 if damage == "cut" else 0])
    with pytest.raises(SpecError, match=r"ends early|damaged|cannot be read|no readable|another program|not JSON"):
        load_all(copy_of)


def reseal(folder: Path, index: bytes) -> None:
    """Another index, with checksums to match."""
    (folder / ".metadata").write_bytes(index)
    manifest = json.loads((folder / "checkpoint.json").read_text())
    manifest.pop("checksum")
    manifest["files"][".metadata"] = [[0, len(index), zlib.crc32(index)]]
    manifest["checksum"] = checkpoint._checksum(manifest)
    (folder / "checkpoint.json").write_text(json.dumps(manifest))


def bare(kind: type) -> Any:
    """An object as a pickle can make it: without any of its fields."""
    return kind.__new__(kind)


def another_model(index: Metadata) -> None:
    index.state_dict_metadata = {name.replace("model.", "optimizer.m."): one for name, one in index.state_dict_metadata.items()}
    places: dict[Any, Any] = index.storage_data
    index.storage_data = {MetadataIndex(at.fqn.replace("model.", "optimizer.m."), at.offset): one for at, one in places.items()}


def another_shape(index: Metadata) -> None:
    entry = next(one for name, one in index.state_dict_metadata.items() if name.startswith("model."))
    entry.size = torch.Size((*entry.size, 1))


FOREIGN: dict[str, Callable[[Metadata], Any]] = {
    "a mapping": lambda index: {"step": 3, "model": [1, 2]},
    "text": lambda index: "a checkpoint",
    "no fields": lambda index: bare(Metadata),
    "no tensors": lambda index: Metadata({}),
    "tensors that are none": lambda index: Metadata({"model.x": 3}),  # type: ignore[dict-item]
    "objects": lambda index: Metadata({"model.x": BytesStorageMetadata()}, storage_data={}),
    "tensors without fields": lambda index: Metadata({"model.x": bare(TensorStorageMetadata)}, storage_data={}),
    "names of another program": lambda index: Metadata({f"net.{name}": one for name, one in index.state_dict_metadata.items()}),
    "names that are no text": lambda index: Metadata(dict(enumerate(index.state_dict_metadata.values()))),  # type: ignore[arg-type]
    "random states of nobody": lambda index: Metadata({"random.rank-x": BytesStorageMetadata()}, storage_data={}),
    "no places": lambda index: Metadata(index.state_dict_metadata),
    "places that are none": lambda index: Metadata(
        index.state_dict_metadata, storage_data=dict.fromkeys(index.storage_data, "here")
    ),
    "places without fields": lambda index: Metadata(
        index.state_dict_metadata, storage_data={at: bare(_StorageInfo) for at in index.storage_data}
    ),
    "tensors of another model": another_model,
    "tensors of another shape": another_shape,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_an_index_of_another_program_is_refused(copy_of: Path, kind: str) -> None:
    index = pickle.loads((copy_of / ".metadata").read_bytes())
    reseal(copy_of, pickle.dumps(FOREIGN[kind](index) or index))
    with pytest.raises(SpecError, match=r"checkpoint .*(cannot be used \(|has no |but this run has ).*: try another"):
        load_all(copy_of)


@pytest.mark.parametrize("kind", FOREIGN)
def test_convert_refuses_it_too(copy_of: Path, kind: str, tmp_path: Path) -> None:
    index = pickle.loads((copy_of / ".metadata").read_bytes())
    reseal(copy_of, pickle.dumps(FOREIGN[kind](index) or index))
    with pytest.raises(SpecError, match=r"checkpoint .*: try another"):
        to_hf(copy_of, tmp_path / "out")


def test_code_named_in_an_index_is_not_executed(copy_of: Path) -> None:
    import os

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {copy_of / 'ran'}",)

    reseal(copy_of, pickle.dumps(Evil()))
    with pytest.raises(SpecError, match=r"it names posix\.system"):
        load_all(copy_of)
    assert not (copy_of / "ran").exists()


def full_disk(engine: Engine, run: Path) -> tuple[list[int | None], str | None]:
    """The disk is full at the second checkpoint; training continues and the third is written."""
    manager = CheckpointManager(engine, run, Checkpointing())
    saved_steps: list[int | None] = []
    failed = None
    for number in range(3):
        engine.step(number)
        if number == 1:
            folder = checkpoint.partial_folder(run, 2)
            if engine.mesh.rank == 0:
                folder.mkdir(parents=True)
                (folder / "__1_0.distcp").symlink_to("/dev/full")
            torch.distributed.barrier()
        manager.save(number + 1)
        manager.wait_for_copy()
        manager.finish()
        saved_steps.append(manager.saved)
        failed = str(manager._error) if number == 1 else failed
    return saved_steps, failed


class FullAfter:
    """A file on a disk that has room for some bytes more."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def __enter__(self) -> FullAfter:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: Any) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(self.file.write(data))


def full_amid_a_tensor(engine: Engine, run: Path, rank: int) -> None:
    """The disk of one rank is full in the middle of what torch writes, where it has an error of its own to raise."""
    manager = CheckpointManager(engine, run, Checkpointing())
    plain = Path.open
    if engine.mesh.rank == rank:
        Path.open = lambda path, mode="r", **more: FullAfter(plain(path, mode, **more), 3000)  # type: ignore[assignment]
    manager.save(1, wait=True)
    Path.open = plain  # type: ignore[method-assign]
    manager.save(2, wait=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_full_within_a_tensor_is_the_same_error_on_every_rank(
    rank: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    in_ranks(full_amid_a_tensor, job_of("llama"), LAYOUTS["dp2"], TRAINING, tmp_path, rank)
    err = capfd.readouterr().err
    assert "the checkpoint of step 1 failed: no space left on the disk (" in err
    assert "inline_container" not in err
    assert [folder.name for folder in checkpoint.complete(tmp_path)] == ["step-000002"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_loses_one_checkpoint_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for saved_steps, failed in in_ranks(full_disk, job_of("llama"), LAYOUTS["dp2"], TRAINING, tmp_path):
        assert saved_steps == [1, 1, 3]
        assert "No space left on device" in str(failed)
    err = capfd.readouterr().err
    assert "the checkpoint of step 2 failed: no space left on the disk" in err
    assert "The last complete one is step-000001" in err
    assert [folder.name for folder in checkpoint.complete(tmp_path)] == ["step-000001", "step-000003"]
    assert not list((tmp_path / "checkpoints").glob(".*"))
    load_all(checkpoint.latest(tmp_path).folder)
