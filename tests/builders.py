"""Builders of specs that many tests need, and of processes that die."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ultrascale.specs.cluster import Cluster
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model


def make_job(
    model: str | Model = "llama-3-8b",
    cluster: str | Cluster = "8xh100",
    seq: int = 8192,
    batch: int | Layout = 64,
    framework: str | Framework | None = None,
    **fields: Any,
) -> Job:
    """A job on presets. `batch`: sequences in a step, or the layout that computes them."""
    if framework is not None:
        fields["framework"] = Framework.load(framework) if isinstance(framework, str) else framework
    return Job(
        model=Model.load(model) if isinstance(model, str) else model,
        cluster=Cluster.load(cluster) if isinstance(cluster, str) else cluster,
        seq=seq,
        batch_tokens=batch.batch_tokens(seq) if isinstance(batch, Layout) else seq * batch,
        **fields,
    )


def exit_in_call(calls: int, *functions: str) -> None:
    """Makes this process die before the given one of its calls of these functions of `os`, counted together."""
    left = calls

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os._exit(9)
            return call(*arguments, **options)

        return wrapped

    for name in functions:
        setattr(os, name, counted(getattr(os, name)))
