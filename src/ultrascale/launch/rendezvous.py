"""Joining and leaving a job: rendezvous in torch's store, with a new prefix for every attempt, and the process group.

torchrun keeps one store for all attempts of a job, with the addresses of dead ranks in it: a restarted rank that reads one
before it is overwritten waits for it for ever. So each attempt first agrees on its own prefix, and reads nothing else.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ultrascale.launch import machine
from ultrascale.launch.rank_info import MAX_NAMED_RANKS, RankInfo
from ultrascale.parallel.mesh import group_timeout_s
from ultrascale.parallel.torch_private import PrefixStore, Store, TCPStore
from ultrascale.specs.errors import RunError

POLL_S = 0.05


def init(rank_info: RankInfo, device: torch.device, timeout_s: float, on_store: Callable[[Store], None] | None = None) -> None:
    """Initializes the default process group; RunError if other ranks do not join.

    `on_store` is called with the store before the process groups connect, which a stopped rank would block.
    """
    cuda = device.type == "cuda"
    address = rank_info.address
    try:
        if address.startswith("agent://"):
            host, _, port = address.removeprefix("agent://").rpartition(":")
            agents = TCPStore(host, int(port), None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
            store = fresh_store(agents, rank_info.rank, rank_info.world, timeout_s)
        else:
            limit = timedelta(seconds=group_timeout_s(timeout_s))
            store, _, _ = next(rendezvous(address, rank_info.rank, rank_info.world, timeout=limit))
            store.set_timeout(limit)
        if on_store is not None:
            on_store(store)
        dist.init_process_group(
            "cuda:nccl,cpu:gloo" if cuda else "gloo",
            store=store,
            rank=rank_info.rank,
            world_size=rank_info.world,
            timeout=timedelta(seconds=group_timeout_s(timeout_s)),
            device_id=device if cuda else None,
        )
    except RunError:
        raise
    except RuntimeError as error:
        raise RunError(
            f"rank {rank_info.rank} did not meet the other ranks of {rank_info.world} at {address}: "
            f"{str(error).splitlines()[0][:300]} "
            "Are all of them started, and can every host reach that address?"
        ) from error


def fresh_store(store: Store, rank: int, world: int, timeout_s: float) -> Store:
    """The store under a prefix that only the ranks of this attempt know.

    Rank 0 proposes a name and sets `go` when all ranks have answered. A rank whose number has already answered has read the
    proposal of an earlier attempt, and waits for the next.
    """
    until = time.monotonic() + timeout_s
    name = f"{world}-{uuid.uuid4().hex}" if rank == 0 else ""
    if rank == 0:
        store.set("round", name)
        store.add(f"{name}/{rank}", 1)
        answers = [f"{name}/{other}" for other in range(world)]
        while not store.check(answers):
            _pause(until, lambda: _missing([rank for rank, key in enumerate(answers) if not store.check([key])], world))
        store.set(f"{name}/go", "")
        return PrefixStore(name, store)
    proposals: set[str] = set()
    while not (name and store.check([f"{name}/go"])):
        proposed = store.get("round").decode() if store.check(["round"]) else ""
        if proposed not in proposals and proposed.startswith(f"{world}-"):
            proposals.add(proposed)
            name = proposed if store.add(f"{proposed}/{rank}", 1) == 1 else ""
        _pause(until, lambda: "rank 0 did not come")
    return PrefixStore(name, store)


def _missing(ranks: list[int], world: int) -> str:
    named = ", ".join(map(str, ranks[:MAX_NAMED_RANKS])) + (", …" if len(ranks) > MAX_NAMED_RANKS else "")
    return f"{len(ranks)} of {world} ranks did not come (rank {named})"


def _pause(until: float, what: Callable[[], str]) -> None:
    if time.monotonic() > until:
        raise RunError(f"ranks could not meet: {what()} within train.timeout_s. Look at their logs, machines and links")
    time.sleep(POLL_S)


def device_of(rank_info: RankInfo) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", rank_info.local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def join(rank_info: RankInfo, timeout_s: float, on_store: Callable[[Store], None] | None = None) -> torch.device:
    """Joins the process group and selects a device; `on_store` is called with the store of the rendezvous."""
    device = device_of(rank_info)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, machine.cores() // rank_info.local_world))
    if rank_info.world > 1:
        init(rank_info, device, timeout_s, on_store)
    return device


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
