"""torch.compile where it pays on a GPU: every block, and the head with its loss."""

from __future__ import annotations

from ultrascale.kernels.fused import FusedBlock
from ultrascale.kernels.loss import ChunkedHead
from ultrascale.model.transformer import Transformer
from ultrascale.specs.layout import Recompute
from ultrascale.train.recompute import from_outside


def apply(model: Transformer, policy: Recompute = "none") -> None:
    """One graph for all blocks alike, recomputation included; one for the head, whose fp32 logits then never reach memory."""
    for block in model.each_block():
        if not isinstance(block, FusedBlock) and not from_outside(block, policy):
            block.compile()
    if isinstance(model.head, ChunkedHead):
        model.head.norm.compile()  # its loss is a kernel of its own already
    elif model.head is not None:
        model.head.compile()
