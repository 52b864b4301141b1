"""benchmarks/gpu/foreign.py: its layouts, and its table of files."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ultrascale.measure.foreign.data_stub import DataPipelineStub
from ultrascale.measure.foreign.request import NOT_COMPILED
from ultrascale.specs.units import GIB

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("foreign")


def test_every_layout_fits_one_gpu_under_a_name_of_its_own(benchmark: Any) -> None:
    found = benchmark.cases()
    assert len({case.name for case in found}) == len(found) >= 24
    assert max(case.estimate_gib() for case in found) < 130


def test_every_second_layer_is_half_of_full_recomputation(benchmark: Any) -> None:
    case = benchmark.Case("8b", "2", tp=8, dp=8, mbs=2)
    assert (case.layout.recompute, case.layout.recompute_layers) == ("full", 16)
    assert 'mode = "selective"\nselective_ac_option = "2"' in case.toml()


def test_files_are_compared(benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other, third = benchmark.cases()[:3]
    files = [tmp_path / name for name in ("gpu.json", "meta.json")]
    lines = [
        [{"layout": one.name, "peak_bytes": 20 * GIB}, {"layout": other.name, "peak_bytes": 10 * GIB}],
        [
            {"layout": one.name, "peak_bytes": 19 * GIB, "notes": []},
            {"layout": other.name, "peak_bytes": 15 * GIB, "notes": [NOT_COMPILED]},
            {"layout": third.name, "error": "it failed"},
        ],
    ]
    for file, found in zip(files, lines, strict=True):
        file.write_text("".join(json.dumps(line) + "\n" for line in found))
    benchmark.compare(*files)
    text = capsys.readouterr().out
    assert "rehearsed: 1 layouts, mean difference 5.00%, worst -5.0%" in text
    assert "estimate: 2 layouts" in text
    assert "15.00*" in text
    assert "* rehearsed without torch.compile, and left out of the mean" in text
    assert "failed" in text


def test_packages_that_are_missing_are_stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "datasets"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [DataPipelineStub(), *sys.meta_path])
    distributed = importlib.import_module("datasets.distributed")
    with pytest.raises(TypeError, match="takes no arguments"):
        distributed.split_dataset_by_node("c4")
    assert sys.modules.pop("datasets").__version__ == "99.0"
    del sys.modules["datasets.distributed"]
