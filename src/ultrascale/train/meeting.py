"""Where the ranks of a job meet: torch's store, fresh for every attempt.

torchrun keeps one store for all attempts of a job, with the addresses of the dead in it: a restarted rank that reads one before
it is overwritten waits for it for ever. So each attempt agrees on a name of its own first, and looks at nothing else.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ultrascale.specs.errors import RunError
from ultrascale.train.world import Seat

POLL_S = 0.05


def meet(seat: Seat, device: torch.device, timeout_s: float) -> None:
    """Makes this process a rank of the world; RunError if the others do not come."""
    cuda = device.type == "cuda"
    place, store = seat.address, None
    try:
        if place.startswith("agent://"):
            host, _, port = place.removeprefix("agent://").rpartition(":")
            agents = TCPStore(host, int(port), None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
            store = agreed(agents, seat.rank, seat.world, timeout_s)
        dist.init_process_group(
            "cuda:nccl,cpu:gloo" if cuda else "gloo",
            init_method=place if store is None else None,
            store=store,
            rank=seat.rank,
            world_size=seat.world,
            timeout=timedelta(seconds=2 * timeout_s),  # the watchdog speaks first: it knows more
            device_id=device if cuda else None,
        )
    except RunError:
        raise
    except RuntimeError as error:
        raise RunError(
            f"rank {seat.rank} did not meet the other ranks of {seat.world} at {place}: {str(error).splitlines()[0][:300]} "
            "Are all of them started, and can every host reach that address?"
        ) from error


def agreed(store: Store, rank: int, world: int, timeout_s: float) -> Store:
    """A part of the store that only the ranks of this attempt know.

    Rank 0 proposes a name and says `go` when everybody has answered to it. Whoever finds that its own rank has answered before
    looks at the proposal of an earlier attempt, and waits for the next.
    """
    until = time.monotonic() + timeout_s
    name = f"{world}-{uuid.uuid4().hex}" if rank == 0 else ""
    if rank == 0:
        store.set("round", name)
        store.add(f"{name}/{rank}", 1)
        answers = [f"{name}/{other}" for other in range(world)]
        while not store.check(answers):
            _pause(until, f"{world - sum(store.check([key]) for key in answers)} of {world} ranks did not come")
        store.set(f"{name}/go", "")
        return PrefixStore(name, store)
    heard: set[str] = set()
    while not (name and store.check([f"{name}/go"])):
        proposed = store.get("round").decode() if store.check(["round"]) else ""
        if proposed not in heard and proposed.startswith(f"{world}-"):
            heard.add(proposed)
            name = proposed if store.add(f"{proposed}/{rank}", 1) == 1 else ""
        _pause(until, "rank 0 did not come")
    return PrefixStore(name, store)


def _pause(until: float, what: str) -> None:
    if time.monotonic() > until:
        raise RunError(f"ranks could not meet: {what} within train.timeout_s. Look at their logs, machines and links")
    time.sleep(POLL_S)
