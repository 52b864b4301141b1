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

from ultrascale.measure.foreign.compiled import OFF
from ultrascale.measure.foreign.device import NOT_COUNTED, device_of
from ultrascale.measure.foreign.pipeline import stages_without_neighbours
from ultrascale.measure.foreign.request import COMPILED, ENGINES, CannotRehearseError, ForeignRehearsal, ForeignRequest
from ultrascale.measure.foreign.run import REQUEST, RESULT
from ultrascale.measure.foreign.watcher import Watcher


def main(folder: Path) -> None:
    request = ForeignRequest.of_json(json.loads((folder / REQUEST).read_text(encoding="utf-8")))
    notes = dict.fromkeys(request.notes)

    def write(data: dict[str, Any]) -> None:
        (folder / "part").write_text(json.dumps(data), encoding="utf-8")
        os.replace(folder / "part", folder / RESULT)

    def save(watcher: Watcher) -> None:
        """The result, if the step that counts fails."""
        write(asdict(_result(request, watcher, (*notes, NOT_COUNTED))))

    def done(watcher: Watcher) -> None:
        if dist.is_initialized():
            write(asdict(_result(request, watcher, tuple(notes))))
        else:
            write({"initialised": False})
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the program's own end may wait for other ranks

    device = device_of(request, notes.setdefault, save, done)
    stages_without_neighbours(request, folder, notes.setdefault)
    try:
        with device.running():
            if request.engine is not None:
                runner = importlib.import_module(f"ultrascale.measure.foreign.{request.engine}")
                runner.run(request, device.watcher, notes.setdefault)
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
    if not (folder / RESULT).exists():
        write({"initialised": dist.is_initialized(), "steps": device.watcher.completed})


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
        gpu=torch.cuda.get_device_name() if request.on_gpu else None,
        step_s=watcher.step_s,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
