"""Run torchtitan's own Trainer with its own configuration: a Python function of 0.3, or a TOML file of 0.2."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ultrascale.measure.foreign.data_stub import stub_data_pipeline
from ultrascale.measure.foreign.request import ForeignRequest
from ultrascale.measure.foreign.watcher import Watcher
from ultrascale.parallel.torch_private import FakeTensor, step_microbatches

GRAPHS = "CUDA graphs are off: their private memory is not counted"
PARTIAL = "parallelism.spmd_backend is partial_dtensor: torchtitan's spmd_types needs a newer torch than {torch}"
NO_DATA = "the tokenizer or the dataset could not be read here: batches of zeros take their place"


def run(request: ForeignRequest, watcher: Watcher, note: Callable[[str], None]) -> None:
    """Its program: FILE.toml, FILE.py, FILE.py:FUNCTION, or MODULE:FUNCTION of torchtitan's own."""
    stub_data_pipeline()
    (_run_toml if request.program.endswith(".toml") else _run_python)(request.program, request.arguments, note)


def _run_python(config: str, arguments: Sequence[str], note: Callable[[str], None]) -> None:
    module, _, function = config.partition(":")
    if module.endswith(".py"):
        file = Path(module).resolve()
        sys.path.insert(0, str(file.parent))
        module, function = file.stem, function or "plan"
    trainer: Any = importlib.import_module("torchtitan.trainer")
    manager = importlib.import_module("torchtitan.config").ConfigManager()
    found = manager.parse_args(["--module", module, "--config", function, *arguments])
    if not found.training.disable_cuda_graphs:
        trainer.wrap_with_cuda_graph = lambda step: step
        note(GRAPHS)
    if found.parallelism.spmd_backend == "spmd_types" and torch.__version__ < "2.14":
        found.parallelism.spmd_backend = "partial_dtensor"
        note(PARTIAL.format(torch=torch.__version__))
    _prepare(found)
    _step_with_micro_batches()
    found.dump_folder = tempfile.gettempdir()
    _readable(type(found.tokenizer), "build", note)
    seq = found.training.seq_len
    _readable(type(found.dataloader), "build", note, lambda given: _Batches(given["local_batch_size"], seq, "positions"))
    found.build().train()


def _run_toml(config: str, arguments: Sequence[str], note: Callable[[str], None]) -> None:
    program = importlib.import_module("torchtitan.train")
    found = importlib.import_module("torchtitan.config").ConfigManager().parse_args(["--job.config_file", config, *arguments])
    _prepare(found)
    found.job.dump_folder = tempfile.gettempdir()
    specs: Any = importlib.import_module("torchtitan.protocols.train_spec")
    get = specs.get_train_spec

    def get_train_spec(name: str) -> Any:
        spec = get(name)
        training = found.training
        _readable(spec, "build_tokenizer_fn", note)
        _readable(spec, "build_dataloader_fn", note, lambda _: _Batches(training.local_batch_size, training.seq_len))
        return spec

    specs.get_train_spec = get_train_spec
    _fill_indices()
    program.Trainer(found).train()


def _fill_indices() -> None:
    """A Triton kernel writes the order of rows into indices that its caller allocates: without memory it has nothing to do."""
    kernels: Any = importlib.import_module("torchtitan.models.moe.kernels")
    fill = kernels.fill_indices_wrapper

    def outer(counts: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(counts, FakeTensor):
            return fill(counts, *args, **kwargs)  # type: ignore[no-any-return]
        return torch.full((args[4],), -1, dtype=torch.int32)  # as many as the fifth of its other arguments says

    kernels.fill_indices_wrapper = outer


def _step_with_micro_batches() -> None:
    """torchtitan gives a pipeline its micro-batches, where torch 2.13 takes a whole batch."""
    pipelines: Any = importlib.import_module("torchtitan.distributed.pipeline_parallel")
    build = pipelines._build_pipeline_schedule

    def outer(**given: Any) -> Any:
        schedule = build(**given)
        schedule.step = partial(step_microbatches, schedule)
        return schedule

    pipelines._build_pipeline_schedule = outer


def _wait_for_nobody() -> None:
    """torchtitan sets timeouts of its groups, with functions that not every torch has."""
    groups: Any = importlib.import_module("torchtitan.distributed.utils")
    groups.set_pg_timeouts = lambda *_, **__: None


def _prepare(config: Any) -> None:
    _wait_for_nobody()
    config.checkpoint.enable = False
    (config.validator if hasattr(config, "validator") else config.validation).enable = False
    config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
    config.comm.trace_buf_size = 0


def _readable(owner: Any, name: str, note: Callable[[str], None], stand_in: Callable[[Any], Any] = lambda _: None) -> None:
    """Calls of owner.name fall back to the stand-in where it fails."""
    build = getattr(owner, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        try:
            found = build(*args, **kwargs)
            if isinstance(stand_in(kwargs), _Batches):
                next(iter(found))
            return found
        except Exception:
            note(NO_DATA)
            return stand_in(kwargs)

    setattr(owner, name, outer)


class _Batches:
    """Inputs and targets of zeros; from 0.3 on with positions."""

    def __init__(self, rows: int, seq: int, *more: str) -> None:
        self.shape, self.names = (rows, seq), ("input", *more)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            *inputs, labels = (torch.zeros(self.shape, dtype=torch.int64) for _ in (*self.names, "labels"))
            yield dict(zip(self.names, inputs, strict=True)), labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        pass
