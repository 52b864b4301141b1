"""A rank alone with real tensors: its kernels run and are timed, but what other ranks would have sent is whatever lay there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ultrascale.train.engine import Engine


def without_values(engine: Engine) -> None:
    """Losses and norms are computed and then read as zero: sums over ranks that are not there may be anything."""

    def zeroed(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: torch.zeros_like(inner(*args))

    owners: tuple[tuple[Any, str], ...] = ((engine, "_mean_loss"), (engine.optimizer, "norm"))
    for owner, name in owners:
        setattr(owner, name, zeroed(getattr(owner, name)))


def kernel_times(step: Callable[[], object]) -> dict[str, float]:
    """Seconds by kernel of one step on a GPU, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:  # else it warns of a second turn
        step()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in seen.key_averages():
        times[event.key] += event.self_device_time_total / 1e6
    return dict(times.most_common())
