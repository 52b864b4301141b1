"""Stand-ins for packages of torchtitan's data pipeline that are not installed: it imports them, and no rehearsal reads data."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

NAMES = ("datasets", "tensorboard", "tokenizers")


class StubType(type):
    """A class whose attributes are such classes too."""

    def __getattr__(cls, name: str) -> StubType:
        return stub(name)


def stub(name: str) -> StubType:
    if name.startswith("__"):
        raise AttributeError(name)
    return StubType(name, (), {})


class DataPipelineStub:
    """Finds the packages, and modules in them, of which every name is a class that takes no arguments."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in NAMES else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__version__, module.__getattr__ = "99.0", stub  # type: ignore[attr-defined, method-assign]
        return module

    def exec_module(self, _: ModuleType) -> None:
        return


def stub_data_pipeline() -> None:
    """Where a package is installed, it is used."""
    sys.meta_path.append(DataPipelineStub())
