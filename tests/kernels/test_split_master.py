"""Masters in halves: every bit comes back, and the upper half is the nearest bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallel.harness import engine_of, job_of, training_of
from ultrascale.kernels import selection, split_master
from ultrascale.kernels.selection import Kernels
from ultrascale.specs.checkpointing import Checkpointing
from ultrascale.specs.layout import Layout
from ultrascale.train import checkpoint
from ultrascale.train.async_checkpoint import CheckpointManager, restore
from ultrascale.train.engine import Engine


def test_the_two_halves_are_the_whole() -> None:
    patterns = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    values = patterns.to(torch.int32).view(torch.float32)
    values = values[values.abs() < 3e38]  # bf16's largest number is no fp32's
    upper, rest = split_master.split(values)
    assert torch.equal(split_master.join(upper, rest).view(torch.int32), values.view(torch.int32))
    nearest = values.bfloat16()
    ties = (values.view(torch.int32) & 0xFFFF) == 0x8000  # torch rounds these to even, the halves away from zero
    assert torch.equal(upper[~ties], nearest[~ties])


def test_ties_and_ends() -> None:
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x00008000], dtype=torch.int32).view(torch.float32)
    for values in (ties, -ties, torch.tensor([0.0, -0.0, 1.0, 2.0**-126])):
        assert torch.equal(split_master.join(*split_master.split(values)), values)
        assert bool((split_master.split(values)[0].float().abs() >= values.abs()).all())


def _engine(monkeypatch: pytest.MonkeyPatch, own: Kernels) -> Engine:
    monkeypatch.setattr(selection, "choose", lambda *_: own)
    return engine_of(job_of("llama", precision="bf16"), Layout(), training_of(steps=3))


@pytest.mark.parametrize("there", [Kernels(adamw=True), Kernels()], ids=["halves", "whole"])
def test_a_checkpoint_is_the_same_in_halves(there: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints have whole fp32 masters: either kind of engine resumes from the other's, bitwise equal."""
    source = _engine(monkeypatch, Kernels(adamw=True))
    assert all(weight.is_split for weight in source.weights)
    for number, weight in enumerate(source.weights):
        values = torch.randn(weight.master.shape, generator=torch.Generator().manual_seed(number))
        weight.set(values)
        assert torch.equal(weight.exact(), values)
        assert torch.equal(weight.parameter.data, weight.local)
    CheckpointManager(source, tmp_path, Checkpointing()).save_final(1)
    other = _engine(monkeypatch, there)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    restore(other, checkpoint.open_checkpoint(found))
    for mine, theirs in zip(other.weights, source.weights, strict=True):
        assert mine.is_split == there.adamw
        assert torch.equal(mine.exact(), theirs.exact())
        torch.testing.assert_close(mine.local, theirs.local)
