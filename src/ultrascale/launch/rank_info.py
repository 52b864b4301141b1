"""Rank, world size and rendezvous address of this process, from the variables of torchrun or Slurm."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ultrascale.specs.errors import SpecError
from ultrascale.specs.validate import shown

MAX_NAMED_RANKS = 8  # ranks that a message names one by one
MAX_RANKS = 2**24  # more than any cluster has, and within torch's 32 bits


@dataclass(frozen=True)
class RankInfo:
    """Rank and world size of one process, global and on its node."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    address: str = "env://"
    """an init_method of torch.distributed, or `agent://host:port`: the store of torchrun's first agent"""
    launch: str = ""
    """identifies the launch, the same for all its attempts; empty if there is only one attempt"""
    restarted: bool = False
    """whether the launcher has restarted this process"""


def rank_info_from_env(environment: Mapping[str, str] | None = None) -> RankInfo | None:
    """The rank that torchrun or srun gave this process; None if neither started it."""
    env = os.environ if environment is None else environment
    if "RANK" in env and "WORLD_SIZE" in env:
        found = _read(env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "env://")
        return _from_torchrun(found, env)
    if "SLURM_PROCID" in env and env.get("SLURM_NTASKS", "1") != "1":
        address = _slurm_address(env)
        found = _read(env, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", address)
        is_restart = env.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
        # A requeued job has the same number.
        launch = f"slurm {env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '0')}"
        return replace(found, launch=launch, restarted=is_restart)
    return None


def _from_torchrun(found: RankInfo, env: Mapping[str, str]) -> RankInfo:
    is_restart = env.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")
    if "MASTER_PORT" in env:  # torch reads it too, but its error names no variable
        _port(env)
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return replace(found, restarted=is_restart)
    endpoint = f"{env.get('MASTER_ADDR', '127.0.0.1')}:{env.get('MASTER_PORT', '0')}"
    launch = f"torchrun {env.get('TORCHELASTIC_RUN_ID', '')} {endpoint}"
    return replace(found, address=f"agent://{endpoint}", launch=launch, restarted=is_restart)


def _read(env: Mapping[str, str], rank: str, world: str, local_rank: str, local_world: str, address: str) -> RankInfo:
    total = _number(env, world, 1, MAX_RANKS, least=1)
    own_rank = _number(env, rank, 0, MAX_RANKS)
    if not own_rank < total:
        raise SpecError(f"the environment's {rank} is {own_rank} but must be less than {world} = {total}: start with torchrun")
    local = _number(env, local_world, total, MAX_RANKS, least=1)
    return RankInfo(own_rank, total, _number(env, local_rank, own_rank, MAX_RANKS), local, address)


def _number(env: Mapping[str, str], name: str, default: int, most: int, least: int = 0) -> int:
    """A whole number in ASCII digits: `str.isdigit` alone accepts '²', which `int` rejects."""
    text = env.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and least <= int(text) <= most):
        raise SpecError(
            f"the environment's {name} is {shown(text)} but must be a whole number from {least} to {most}, such as "
            f"{max(least, default)}"
        )
    return int(text)


def _port(env: Mapping[str, str]) -> int:
    return _number(env, "MASTER_PORT", 29500, 65_535, least=1)


def _slurm_address(env: Mapping[str, str]) -> str:
    """The first node of the job step, and a port that differs between jobs on one node."""
    host = env.get("MASTER_ADDR") or env.get("SLURM_LAUNCH_NODE_IPADDR") or _first_host(env.get("SLURM_NODELIST", ""))
    port = _port(env) if env.get("MASTER_PORT") else 20000 + _number(env, "SLURM_JOB_ID", 0, 2**63) % 20000
    return f"tcp://{host}:{port}"


def _first_host(nodes: str) -> str:
    """`gpu[03-06,09],cpu1` → `gpu03`."""
    first = nodes.split(",")[0]
    prefix, bracket, inside = first.partition("[")
    return prefix + inside.split("-")[0].rstrip("]") if bracket else first or "127.0.0.1"
