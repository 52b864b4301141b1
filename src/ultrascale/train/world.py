"""How many processes there are and which one this is: torchrun's variables, Slurm's, or local processes of our own.

Environment variables are read here and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ultrascale.specs.errors import SpecError


@dataclass(frozen=True)
class Seat:
    """One process's place among all."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    address: str = "env://"
    """what torch.distributed takes as init_method"""


def seat(environment: Mapping[str, str] | None = None) -> Seat | None:
    """The seat that torchrun or srun gave this process; None: it was started by hand."""
    given = os.environ if environment is None else environment
    if "RANK" in given and "WORLD_SIZE" in given:
        return _from(given, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "env://")
    if "SLURM_PROCID" in given and int(given.get("SLURM_NTASKS", "1")) > 1:
        return _from(given, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", _slurm_address(given))
    return None


def _from(given: Mapping[str, str], rank: str, world: str, local_rank: str, local_world: str, address: str) -> Seat:
    def number(name: str, default: int) -> int:
        text = given.get(name, str(default))
        if not text.isdigit():
            raise SpecError(f"the environment's {name} is '{text:.40}' but must be a whole number, such as {default}")
        return int(text)

    total = number(world, 1)
    mine = number(rank, 0)
    if not mine < total:
        raise SpecError(f"the environment's {rank} is {mine} but must be less than {world} = {total}: start with torchrun")
    return Seat(mine, total, number(local_rank, mine), number(local_world, total), address)


def _slurm_address(given: Mapping[str, str]) -> str:
    """The first node of the job step, and a port that two jobs on one node do not share."""
    host = given.get("MASTER_ADDR") or given.get("SLURM_LAUNCH_NODE_IPADDR") or _first_host(given.get("SLURM_NODELIST", ""))
    port = given.get("MASTER_PORT") or str(20000 + int(given.get("SLURM_JOB_ID", "0")) % 20000)
    return f"tcp://{host}:{port}"


def _first_host(nodes: str) -> str:
    """`gpu[03-06,09],cpu1` → `gpu03`."""
    first = nodes.split(",")[0]
    prefix, bracket, inside = first.partition("[")
    return prefix + inside.split("-")[0].rstrip("]") if bracket else first or "127.0.0.1"
