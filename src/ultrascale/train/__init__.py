"""Training: request, build, step, loop, optimizer, metrics, checkpoints."""

from __future__ import annotations

from ultrascale.specs.errors import SpecError


def import_torch() -> None:
    """Imports torch before processes fork, so that none of them has to; a clear error if torch is missing."""
    try:
        import torch._dynamo
        import torch.distributed.checkpoint  # noqa: F401
    except ModuleNotFoundError as missing:
        raise SpecError(
            f"training needs torch, and {missing.name} is not installed: try pip install 'ultrascale[train]'"
        ) from None
