"""Loggers: every known number arrives; one that is missing or fails is named once and never ends a run."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from train.test_log import FIELDS, lines, record
from ultrascale.train.log import MetricsLog
from ultrascale.train.sinks import LIBRARIES, open_sinks

MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}
MAKERS = {"tensorboard": "SummaryWriter", "wandb": "init", "trackio": "init"}


class Recorder:
    """Stands for SummaryWriter and for a run of wandb or Trackio."""

    def __init__(self, **fields: Any) -> None:
        self.fields, self.logged, self.closed = fields, {}, False

    def add_scalar(self, name: str, value: float, global_step: int) -> None:
        self.logged[name, global_step] = value

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged |= {(name, step): value for name, value in values.items()}

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    finish = close


@pytest.mark.parametrize("name", MAKERS)
def test_a_logger_gets_every_known_number(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorders: list[Recorder] = []

    def make(**fields: Any) -> Recorder:
        recorders.append(Recorder(**fields))
        return recorders[-1]

    stand_in = ModuleType(MODULES[name])
    setattr(stand_in, MAKERS[name], make)
    monkeypatch.setitem(sys.modules, MODULES[name], stand_in)
    log = MetricsLog(tmp_path, sinks=open_sinks([name], tmp_path, {"layout": {"dp": 2}}))
    log.write(record(3, mfu=None, loss=math.nan))
    log.close()
    assert set(recorders[0].logged) == {(field, 3) for field in FIELDS if field not in ("step", "mfu", "loss")}
    assert recorders[0].logged["lr", 3] == 3e-4
    assert recorders[0].closed
    if name != "tensorboard":
        assert recorders[0].fields["config"] == {"layout": {"dp": 2}}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_missing_logger_is_one_note(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, MODULES[name], None)
    log = MetricsLog(tmp_path, sinks=open_sinks([name], tmp_path, {}))
    for step in (1, 2):
        log.write(record(step))
    log.close()
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith(f"note: train.log={name} is off: ")
    assert note.endswith(f"try pip install 'ultrascale[{name}]'")
    assert len(lines(log.path)) == 2


@pytest.mark.parametrize("place", ["open", "write", "close"])
@pytest.mark.parametrize("error", [RuntimeError("no server\nat all"), SystemExit(1), OSError(28, "No space left")])
def test_a_failing_logger_is_one_note(
    place: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing:
        def __init__(self, *_: object) -> None:
            self.fail("open")

        def fail(self, here: str) -> None:
            if here == place:
                raise error

        def write(self, *_: object) -> None:
            self.fail("write")

        def close(self) -> None:
            self.fail("close")

    monkeypatch.setitem(LIBRARIES, "wandb", Failing)  # type: ignore[arg-type]
    log = MetricsLog(tmp_path, sinks=open_sinks(["wandb"], tmp_path, {}))
    for step in (1, 2):
        log.write(record(step))
    log.close()
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith(f"note: train.log=wandb is off: {type(error).__name__}")
    assert len(lines(log.path)) == 2


def test_tensorboard_itself(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (sink,) = open_sinks(["tensorboard"], tmp_path, {})
    sink.write(7, {"loss": 2.5})
    sink.close()
    found = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(7, 2.5)]


def test_trackio_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    (sink,) = open_sinks(["trackio"], tmp_path, {"model": "tiny"})
    sink.write(7, {"loss": 2.5})
    sink.close()
    assert "note:" not in capsys.readouterr().err
    assert list((tmp_path / "trackio").rglob("*.db"))


def test_mlflow_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for step in (1, 2):  # the second continues the first
        (sink,) = open_sinks(["mlflow"], tmp_path, {"model": "tiny"})
        sink.write(step, {"loss": 2.5})
        sink.close()
    assert "note:" not in capsys.readouterr().err
    (run,) = mlflow.search_runs(experiment_names=["ultrascale"], output_format="list")
    assert [one.step for one in mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")] == [1, 2]
