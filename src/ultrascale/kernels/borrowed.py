"""Kernels of other packages: whether they are there, and what they compute in."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


def why_not(package: str, module: str, dtype: torch.dtype) -> str | None:
    """Why they are not asked; None: they are. Sizes and GPUs they refuse by themselves."""
    if not installed(module):
        return f"{package} is not installed"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bf16 and fp16, and here is {str(dtype).removeprefix('torch.')}"
    return None


@cache
def installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False
