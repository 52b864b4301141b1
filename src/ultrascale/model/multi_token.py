"""Multi-token prediction (DeepSeek-V3, section 2.2): the tokens that each of its layers reads and has to predict."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ultrascale.model.transformer import IGNORE_INDEX


def tokens_ahead(tokens: Tensor, targets: Tensor, depth: int, documents: Tensor | None = None) -> Tensor:
    """[b, s, depth, 2]: the token `k` places after each of `tokens` [b, s] and the target there, for k from 1 to `depth`.

    There is no target where that place is beyond the end of the sequence, or in another document.
    """
    found = []
    for k in range(1, depth + 1):
        targets_then = F.pad(targets[:, k:], (0, k), value=IGNORE_INDEX)
        if documents is not None:
            targets_then[:, :-k].masked_fill_(documents[:, k:] != documents[:, :-k], IGNORE_INDEX)
        found.append(torch.stack((F.pad(tokens[:, k:], (0, k)), targets_then), -1))
    return torch.stack(found, 2)
