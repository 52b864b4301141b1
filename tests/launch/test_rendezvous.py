"""Ranks of one attempt find each other in a store that is full of an earlier attempt's keys."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore, Store

from ultrascale.launch.rendezvous import fresh_store
from ultrascale.specs.errors import RunError

WORLD = 4


def rendezvous_all(store: Store, order: list[int], world: int = WORLD, pause_s: float = 0.0) -> list[Store]:
    """Ranks join in this order, with a pause between them."""
    with ThreadPoolExecutor(world) as pool:
        coming: dict[int, Future[Store]] = {}
        for rank in order:
            coming[rank] = pool.submit(fresh_store, store, rank, world, 20)
            time.sleep(pause_s)
        return [coming[rank].result() for rank in range(world)]


def together(stores: list[Store], word: str) -> bool:
    """Whether all see what the first wrote."""
    stores[0].set(word, "here")
    return all(store.check([word]) for store in stores)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]])
def test_every_attempt_has_its_own_store_prefix(order: list[int]) -> None:
    store = HashStore()
    attempts = [rendezvous_all(store, order, pause_s=0.1) for _ in range(3)]
    for number, stores in enumerate(attempts):
        assert together(stores, f"attempt {number}")
    assert not attempts[1][0].check(["attempt 0"])
    assert not attempts[2][3].check(["attempt 1"])


def test_an_attempt_without_rendezvous_is_skipped() -> None:
    store = HashStore()
    store.set("round", f"{WORLD}-dead")  # rank 0 proposed it and died; rank 2 had answered
    store.add(f"{WORLD}-dead/2", 1)
    assert together(rendezvous_all(store, [1, 2, 3, 0], pause_s=0.1), "word")


def test_a_job_that_grew_does_not_join_the_smaller_one() -> None:
    store = HashStore()
    small = rendezvous_all(store, [0, 1], world=2)
    grown = rendezvous_all(store, [2, 3, 1, 0], world=4, pause_s=0.1)
    assert together(grown, "word")
    assert not small[0].check(["word"])


@pytest.mark.parametrize(("rank", "missing"), [(0, "1 of 2 ranks did not come"), (1, "rank 0 did not come")])
def test_a_rendezvous_timeout_names_the_missing_ranks(rank: int, missing: str) -> None:
    with pytest.raises(RunError, match=missing):
        fresh_store(HashStore(), rank, 2, 0.3)
