"""What a user asked for on the command line, as a Job: names of presets or files, sizes as words, `here`."""

from __future__ import annotations

from ultrascale.specs import units
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.model import Model
from ultrascale.specs.validate import build


def job(
    model: str,
    cluster: str,
    batch_tokens: str,
    seq: str,
    precision: str = "bf16",
    gradients: str = "fp32",
    optimizer: str = "adamw",
    attention: str = "flash",
    total_tokens: str | None = None,
    framework: str = "ultrascale",
) -> Job:
    place = cluster_named(cluster)
    engine = Framework.load("ultrascale-eager" if framework == "ultrascale" and place.gpu.name == "cpu" else framework)
    return build(
        Job,
        {
            "model": Model.load(model),
            "cluster": place,
            "seq": units.tokens(seq, "--seq", "8192 or 8k"),
            "batch_tokens": units.tokens(batch_tokens, "--batch-tokens"),
            "precision": precision,
            "gradients": gradients,
            "optimizer": optimizer,
            "attention": "plain" if engine.attention.startswith("plain") else attention,
            "framework": engine,
            "total_tokens": None if total_tokens is None else units.total_tokens(total_tokens, "--total-tokens"),
        },
        "job",
    )


def cluster_named(name: str) -> Cluster:
    """A preset, a file, or `here`: this machine, its GPUs or two processes of its CPU; `4xhere` for four."""
    count, _, place = name.strip().lower().rpartition("x")
    if place != "here" or not (count == "" or (count.isascii() and count.isdigit() and 1 <= len(count) <= 4 and int(count))):
        return Cluster.load(name)
    from ultrascale.launch import machine
    from ultrascale.train import import_torch

    import_torch()
    return machine.detect(int(count) if count else len(machine.gpu_names()) or 2)
