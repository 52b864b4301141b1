"""The Triton kernel that casts against torch's own copy; here by Triton's interpreter (test_interpreted.py)."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU or Triton's interpreter")
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 4])
def test_gradients_are_copied_as_by_torch(ranks: int, dtype: torch.dtype) -> None:
    from ultrascale.kernels import cast_triton

    torch.manual_seed(0)
    shapes = [(64, 33), (8,), (1200, 40), (4, 2, 3)]
    gradients = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    size = sum(one.numel() for one in gradients)
    wanted, found = (torch.zeros(ranks, size // ranks, device=DEVICE) for _ in range(2))
    torch._chunk_cat(gradients, 0, ranks, out=wanted)
    cast_triton.chunk_cat(gradients, found)
    assert torch.equal(found, wanted)


def test_shards_are_cast_as_by_torch() -> None:
    from ultrascale.kernels import cast_triton

    torch.manual_seed(0)
    shards = [torch.randn(size, device=DEVICE) for size in (5000, 0, 7)]
    if DEVICE == "cpu":  # Triton's interpreter does not round
        shards = [shard.bfloat16().float() for shard in shards]
    wanted, found = (torch.zeros(3 * 5007, dtype=torch.bfloat16, device=DEVICE).split([5007, 10014])[0] for _ in range(2))
    for whole, copy in ((wanted, torch._foreach_copy_), (found, cast_triton.copy)):
        copy(list(whole.split([5000, 0, 7])), shards)
    assert torch.equal(found, wanted)


def test_gradients_are_added_as_by_torch() -> None:
    from ultrascale.kernels import cast_triton

    torch.manual_seed(0)
    gradient = torch.randn(5000, device=DEVICE).bfloat16()
    found = torch.randn(5000, device=DEVICE)
    wanted = found + gradient
    cast_triton.copy([found], [gradient], add=True)
    assert torch.equal(found, wanted)


def test_other_gradients_are_left_to_torch() -> None:
    from ultrascale.kernels import cast_triton

    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    assert not cast_triton.fits([torch.zeros(6, 2, device=device)], 4)
    assert not cast_triton.fits([torch.zeros(2, 4, device=device).t()], 4)
    assert not cast_triton.fits([torch.zeros(8, 2)], 4)
