"""Optional packages of kernels: whether one is installed, and how a run goes on with the plain kernel where one fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class OptionalPackage:
    """A package whose errors, of any kind and at any call, never end a run."""

    def __init__(self, name: str, module: str, instead: str) -> None:
        self.name, self.module, self.instead = name, module, instead
        """as pip knows it, what is imported, and the plain kernel in words"""
        self.failure = ""
        """its first error, after which it is not called again"""
        self._raises = False

    def why_not(self, dtype: torch.dtype) -> str | None:
        """Why it is not tried; None: it is. Sizes and GPUs it refuses by itself."""
        import torch

        if not installed(self.module):
            return f"{self.name} is not installed"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it computes in bf16 and fp16, and here is {str(dtype).removeprefix('torch.')}"
        return None

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Errors are raised here, for who tries the package before a run uses it."""
        before, self._raises = self._raises, True
        try:
            yield
        finally:
            self._raises = before

    def call(self, kernel: Callable[[], T], plain: Callable[[], T]) -> T:
        """What `kernel` computes with the package; from its first error on, which is told once, what `plain` does."""
        import torch

        if self._raises:
            return kernel()
        if not self.failure:
            try:
                return kernel()
            except torch.OutOfMemoryError:  # no fault of the package: the run says what would fit
                raise
            except Exception as error:  # compilers and drivers of its own, whose errors are of many kinds
                self.failure = one_line(error)
                if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
                    sys.stderr.write(f"\nnote: {self.name} failed ({self.failure}): the run goes on with {self.instead}\n")
        return plain()


FLASH_ATTENTION_4 = OptionalPackage("flash-attn-4", "flash_attn.cute.interface", "torch's attention")
QUACK = OptionalPackage("quack-kernels", "quack.gemm_interface", "plain gates")
PACKAGES = (FLASH_ATTENTION_4, QUACK)


@cache
def installed(module: str) -> bool:
    """Is there such a module? No code of its packages runs: half-installed ones raise all kinds of errors at import."""
    parts = module.split(".")
    try:
        found = find_spec(parts[0])
        for depth in range(2, len(parts) + 1):
            if found is None or found.submodule_search_locations is None:
                return False
            found = PathFinder.find_spec(".".join(parts[:depth]), list(found.submodule_search_locations))
    except Exception:  # a finder that another package put in, or a module that is loaded and does not say from where
        return False
    return found is not None


def one_line(error: BaseException) -> str:
    """An error's kind and the first line of what it says."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
