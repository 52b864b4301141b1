"""cuDNN's attention of tiles, on a GPU: merged over all keys, output and gradients are those of plain attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ultrascale.kernels import fused
from ultrascale.model.attention import TileAttention, attend, attend_backward

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


@pytest.mark.parametrize("cudnn", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_two_tiles_are_the_whole(cudnn: bool, kv_heads: int) -> None:
    """The second half of a sequence: its own keys with a causal mask, and those before it."""
    half, scale = 128, 64**-0.5
    q, grad = numbers(2, half, 4, 64, seed=0), numbers(2, half, 4, 64, seed=1)
    k, v = numbers(2, 2 * half, kv_heads, 64, seed=2), numbers(2, 2 * half, kv_heads, 64, seed=3)
    tiles = TileAttention()
    tiles.cudnn = cudnn
    before, own = slice(0, half), slice(half, None)
    out, lse = tiles(q, k[:, own], v[:, own], True)
    out, lse = out.float(), lse.clone()
    fused.merge_attention_(out, lse, *tiles(q, k[:, before], v[:, before], False))
    wide = [x.double() for x in (q, k, v, grad)]
    whole_q = torch.cat((torch.zeros_like(wide[0]), wide[0]), dim=1)  # causal attention of the whole sequence
    wanted, wanted_lse = attend(whole_q, wide[1], wide[2], True, scale)
    torch.testing.assert_close(out.double(), wanted[:, own], rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse.double(), wanted_lse[:, :, own], rtol=1e-3, atol=1e-3)
    whole_grad = torch.cat((torch.zeros_like(wide[3]), wide[3]), dim=1)
    wanted_q, wanted_k, wanted_v = attend_backward(whole_grad, whole_q, wide[1], wide[2], wanted, wanted_lse, True, scale)
    merged = out.bfloat16(), lse
    parts = [
        tiles.gradients(grad, q, k[:, keys], v[:, keys], *merged, causal) for keys, causal in ((before, False), (own, True))
    ]
    torch.testing.assert_close((parts[0][0].float() + parts[1][0]).double(), wanted_q[:, own], rtol=0.03, atol=0.03)
    for number, wanted_grad in ((1, wanted_k), (2, wanted_v)):
        found = torch.cat([part[number] for part in parts], dim=1)
        torch.testing.assert_close(found.double(), wanted_grad, rtol=0.03, atol=0.03)
