"""The process that runs a foreign program as one rank: `python -m ultrascale.measure.foreign.child FOLDER`.

FOLDER has the request, and gets the result. The program ends with the step that is counted. A program that fails with
torch.compile is run again without it.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import traceback
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ultrascale.measure.foreign.compiled import OFF, rehearse_compiled
from ultrascale.measure.foreign.gpu import ValuesOfZero, answer_for_gpu, without_gpu
from ultrascale.measure.foreign.peers import without_peers
from ultrascale.measure.foreign.request import COMPILED, ENGINES, CannotRehearseError, ForeignRehearsal, ForeignRequest
from ultrascale.measure.foreign.run import REQUEST, RESULT
from ultrascale.measure.foreign.watcher import Watcher

VALUES = "tensors have no values: what the program reads of them is zero, and a mask selects everything"
BALANCED = "experts are chosen equally often"


def main(folder: Path) -> None:
    request = ForeignRequest.of_json(json.loads((folder / REQUEST).read_text(encoding="utf-8")))
    notes = dict.fromkeys([*request.notes, VALUES])

    def write(data: dict[str, Any]) -> None:
        (folder / "part").write_text(json.dumps(data), encoding="utf-8")
        os.replace(folder / "part", folder / RESULT)

    def done(watcher: Watcher) -> None:
        if fake.routed:
            notes.setdefault(BALANCED)
        write(asdict(_result(request, watcher, tuple(notes))))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the program's own end may wait for other ranks

    fake = ValuesOfZero()
    watcher = Watcher(fake, request.steps, done)
    answer_for_gpu(request.rank % request.gpus_per_node, request.gpus_per_node, lambda: (watcher.current, watcher.peak))
    without_peers(request.rank, request.world)
    try:
        rehearse_compiled(fake, notes.setdefault)
        with without_gpu(fake), watcher:
            if request.engine is not None:
                runner = importlib.import_module(f"ultrascale.measure.foreign.{request.engine}")
                runner.run(request.program, request.arguments, notes.setdefault)
            else:
                _run_script(request)
    except CannotRehearseError as refused:
        write({"refused": str(refused)})
        return
    except Exception:
        if COMPILED not in notes:
            raise
        traceback.print_exc()
        sys.stdout.flush()
        again = [sys.executable, "-m", "ultrascale.measure.foreign.child", str(folder)]
        os.execve(sys.executable, again, {**os.environ, OFF[0]: "1"})
    write({"initialised": dist.is_initialized(), "steps": watcher.completed})


def _run_script(request: ForeignRequest) -> None:
    sys.argv = [request.program, *request.arguments]
    sys.path[0] = str(Path(request.program).resolve().parent)
    try:
        runpy.run_path(request.program, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def _result(request: ForeignRequest, watcher: Watcher, notes: tuple[str, ...]) -> ForeignRehearsal:
    engine = None if request.engine is None else f"{request.engine} {metadata.version(ENGINES[request.engine].package)}"
    return ForeignRehearsal(
        rank=request.rank,
        world=request.world,
        step=watcher.completed,
        peak=watcher.peak,
        moment=watcher.moment,
        memory=watcher.peak_by_owner,
        most=dict(watcher.most),
        flops={name: count for (_, name), count in watcher.flops.most_common()},
        collectives=watcher.collectives(),
        notes=notes,
        torch=torch.__version__,
        engine=engine,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
