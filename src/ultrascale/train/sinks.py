"""Loggers of `train.log`: TensorBoard, Weights & Biases, Trackio and MLflow behind one small interface.

Each is an extra of the package. One that is missing or fails, at any time and with any error, is reported in one note and is
off from then on: metrics.jsonl has every number, and the run goes on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Config = Mapping[str, Any]
PROJECT = "ultrascale"


class TensorBoardSink:
    def __init__(self, folder: Path, _: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(log_dir=str(folder / "tensorboard"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandBSink:
    """Also Trackio's, which has the same functions. The run's folder is its identity: a resumed run continues its curves."""

    def __init__(self, folder: Path, config: Config) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=PROJECT, name=folder.name, id=folder.name, resume="allow", dir=str(folder), config=dict(config)
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioSink(WandBSink):
    def __init__(self, folder: Path, config: Config) -> None:
        import trackio

        self._run = trackio.init(project=PROJECT, name=folder.name, resume="allow", config=dict(config), embed=False)


class MLflowSink:
    """Into the run's folder, unless MLFLOW_TRACKING_URI names a server."""

    def __init__(self, folder: Path, config: Config) -> None:
        import mlflow

        if not os.environ.get("MLFLOW_TRACKING_URI"):
            # MLflow 3 asks for a database unless files are allowed by name.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            mlflow.set_tracking_uri((folder.resolve() / "mlflow").as_uri())
        mlflow.set_experiment(PROJECT)
        self._mlflow: Any = mlflow
        known = mlflow.search_runs(filter_string=f"attributes.run_name = '{folder.name}'", max_results=1, output_format="list")
        mlflow.start_run(run_id=known[0].info.run_id) if known else mlflow.start_run(run_name=folder.name)
        mlflow.log_params(dict(config))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


Library = TensorBoardSink | WandBSink | MLflowSink
LIBRARIES: dict[str, Callable[[Path, Config], Library]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandBSink,
    "trackio": TrackioSink,
    "mlflow": MLflowSink,
}


class OptionalSink:
    """A library that may be missing or fail: then one note is printed, and nothing more is sent to it."""

    def __init__(self, name: str, folder: Path, config: Config) -> None:
        self._name = name
        self._library: Library | None = None
        self._guarded(lambda: setattr(self, "_library", LIBRARIES[name](folder, config)))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if (library := self._library) is not None:
            self._guarded(lambda: library.write(step, values))

    def close(self) -> None:
        if (library := self._library) is not None:
            self._guarded(library.close)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # some libraries end the process when they cannot log in
            self._library = None
            print(f"note: train.log={self._name} is off: {_reason(self._name, error)}", file=sys.stderr)


def _reason(name: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name or name} is not installed: try pip install 'ultrascale[{name}]'"
    first = (str(error).strip().splitlines() or [""])[0][:160]
    return f"{type(error).__name__}{': ' if first else ''}{first}; metrics.jsonl has all metrics"


def open_sinks(names: Iterable[str], folder: Path, config: Config) -> list[OptionalSink]:
    """The sinks of `train.log`, in its order."""
    return [OptionalSink(name, folder, config) for name in names]
