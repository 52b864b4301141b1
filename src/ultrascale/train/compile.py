"""torch.compile on a GPU: every block, and the head with its loss."""

from __future__ import annotations

from ultrascale.kernels.fused import FusedBlock
from ultrascale.kernels.loss import ChunkedHead
from ultrascale.model.transformer import Transformer
from ultrascale.specs.layout import Recompute
from ultrascale.train.recompute import from_outside


def apply(model: Transformer, policy: Recompute = "none") -> None:
    """Compiles one graph for all equal blocks, including recomputation, and one for the head, without fp32 logits in memory."""
    for block in model.each_block():
        if not isinstance(block, FusedBlock) and not from_outside(block, policy):
            block.compile()
    if isinstance(model.head, ChunkedHead):
        model.head.norm.compile()  # its loss is already one kernel
    elif model.head is not None:
        model.head.compile()
