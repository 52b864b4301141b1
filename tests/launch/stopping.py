"""`python stopping.py PHASE HOW train …`: the command line, in which rank 1 stops (SIGSTOP) or sleeps in a phase of the run."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ultrascale import cli
from ultrascale.launch import machine, rank, rendezvous
from ultrascale.train import async_checkpoint, engine

machine.gpu_names = list  # type: ignore[assignment]
# The function that begins each phase, in the module or class that calls it.
PHASES: dict[str, tuple[Any, str]] = {
    "join": (rendezvous, "init"),
    "build": (rank, "Batches"),
    "restore": (rank, "restore"),
    "step": (engine.Engine, "backward"),
    "save": (async_checkpoint, "save"),
    "evaluate": (engine.Engine, "evaluate"),
    "gather": (rank, "measurement"),
    "leave": (rank, "leave"),
}


def main(phase: str, how: str) -> None:
    holder, name = PHASES[phase]
    original: Callable[..., Any] = getattr(holder, name)

    def stopping(*arguments: Any, **options: Any) -> Any:
        rank = dist.get_rank() if dist.is_initialized() else getattr(arguments[0], "rank", None) if arguments else None
        if rank == 1:
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(3600)
        return original(*arguments, **options)

    setattr(holder, name, stopping)
    sys.argv = ["ultrascale", *sys.argv[3:]]
    cli.main()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
