"""Optional kernel packages: whether one is installed, and the fallback to the plain kernel if one fails."""

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
    """A package whose errors, of any class and in any call, never end a run."""

    def __init__(self, name: str, module: str, instead: str) -> None:
        self.name, self.module, self.instead = name, module, instead
        """name in pip, module to import, and a description of the plain kernel"""
        self.failure = ""
        """the first error, after which the package is not called again"""
        self._raises = False

    def why_not(self, dtype: torch.dtype) -> str | None:
        """Why it is not tried; None if it is. The package itself rejects unsupported sizes and GPUs."""
        import torch

        if not installed(self.module):
            return f"{self.name} is not installed"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it computes in bf16 and fp16, and here is {str(dtype).removeprefix('torch.')}"
        return None

    @contextmanager
    def raising(self) -> Iterator[None]:
        """A context in which errors are raised, to try the package before a run uses it."""
        before, self._raises = self._raises, True
        try:
            yield
        finally:
            self._raises = before

    def call(self, kernel: Callable[[], T], plain: Callable[[], T]) -> T:
        """Returns `kernel()`; from its first error on, which is printed once, `plain()`."""
        import torch

        if self._raises:
            return kernel()
        if not self.failure:
            try:
                return kernel()
            except torch.OutOfMemoryError:  # not the package's fault: the run reports what would fit
                raise
            except Exception as error:  # the package has its own compilers and drivers, with errors of many classes
                self.failure = one_line(error)
                if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
                    sys.stderr.write(f"\nnote: {self.name} failed ({self.failure}): the run goes on with {self.instead}\n")
        return plain()


FLASH_ATTENTION_4 = OptionalPackage("flash-attn-4", "flash_attn.cute.interface", "torch's attention")
QUACK = OptionalPackage("quack-kernels", "quack.gemm_interface", "plain gates")
PACKAGES = (FLASH_ATTENTION_4, QUACK)


@cache
def installed(module: str) -> bool:
    """Whether a module exists, without running its code: half-installed packages raise all kinds of errors at import."""
    parts = module.split(".")
    try:
        found = find_spec(parts[0])
        for depth in range(2, len(parts) + 1):
            if found is None or found.submodule_search_locations is None:
                return False
            found = PathFinder.find_spec(".".join(parts[:depth]), list(found.submodule_search_locations))
    except Exception:  # a finder installed by another package, or a loaded module without a spec
        return False
    return found is not None


def one_line(error: BaseException) -> str:
    """An error's class and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
