"""How many processes there are and which one this is: torchrun's variables, Slurm's, or local processes of our own.

Environment variables are read here and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ultrascale.specs.errors import SpecError
from ultrascale.specs.validate import shown

MOST_RANKS = 2**24  # far more than any cluster has, and small enough for torch's 32 bits


@dataclass(frozen=True)
class RankInfo:
    """One process's place among all."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    address: str = "env://"
    """what torch.distributed takes as init_method, or `agent://host:port`: the store of torchrun's first agent"""
    launch: str = ""
    """the same for every attempt of one launch; empty where there is one attempt"""
    restarted: bool = False
    """the launcher says that this is not the first attempt"""


def rank_info_from_env(environment: Mapping[str, str] | None = None) -> RankInfo | None:
    """The rank that torchrun or srun gave this process; None: it was started by hand."""
    given = os.environ if environment is None else environment
    if "RANK" in given and "WORLD_SIZE" in given:
        found = _from(given, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "env://")
        return _of_torchrun(found, given)
    if "SLURM_PROCID" in given and given.get("SLURM_NTASKS", "1") != "1":
        address = _slurm_address(given)
        found = _from(given, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", address)
        again = given.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
        launch = f"slurm {given.get('SLURM_JOB_ID', '')}.{given.get('SLURM_STEP_ID', '0')}"  # a requeued job keeps its number
        return replace(found, launch=launch, restarted=again)
    return None


def _of_torchrun(found: RankInfo, given: Mapping[str, str]) -> RankInfo:
    again = given.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")
    if "MASTER_PORT" in given:  # torch reads it too, and names no variable when it cannot
        _port(given)
    if given.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return replace(found, restarted=again)
    place = f"{given.get('MASTER_ADDR', '127.0.0.1')}:{given.get('MASTER_PORT', '0')}"
    launch = f"torchrun {given.get('TORCHELASTIC_RUN_ID', '')} {place}"
    return replace(found, address=f"agent://{place}", launch=launch, restarted=again)


def _from(given: Mapping[str, str], rank: str, world: str, local_rank: str, local_world: str, address: str) -> RankInfo:
    total = _number(given, world, 1, MOST_RANKS, least=1)
    mine = _number(given, rank, 0, MOST_RANKS)
    if not mine < total:
        raise SpecError(f"the environment's {rank} is {mine} but must be less than {world} = {total}: start with torchrun")
    here = _number(given, local_world, total, MOST_RANKS, least=1)
    return RankInfo(mine, total, _number(given, local_rank, mine, MOST_RANKS), here, address)


def _number(given: Mapping[str, str], name: str, default: int, most: int, least: int = 0) -> int:
    """A whole number in ASCII digits: `str.isdigit` alone takes '²', which `int` does not."""
    text = given.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and least <= int(text) <= most):
        raise SpecError(
            f"the environment's {name} is {shown(text)} but must be a whole number from {least} to {most}, such as "
            f"{max(least, default)}"
        )
    return int(text)


def _port(given: Mapping[str, str]) -> int:
    return _number(given, "MASTER_PORT", 29500, 65_535, least=1)


def _slurm_address(given: Mapping[str, str]) -> str:
    """The first node of the job step, and a port that two jobs on one node do not share."""
    host = given.get("MASTER_ADDR") or given.get("SLURM_LAUNCH_NODE_IPADDR") or _first_host(given.get("SLURM_NODELIST", ""))
    port = _port(given) if given.get("MASTER_PORT") else 20000 + _number(given, "SLURM_JOB_ID", 0, 2**63) % 20000
    return f"tcp://{host}:{port}"


def _first_host(nodes: str) -> str:
    """`gpu[03-06,09],cpu1` → `gpu03`."""
    first = nodes.split(",")[0]
    prefix, bracket, inside = first.partition("[")
    return prefix + inside.split("-")[0].rstrip("]") if bracket else first or "127.0.0.1"
