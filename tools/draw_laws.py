"""Curves of the documents' pictures: laws and fitted surfaces over sizes. draw_docs.py writes them."""

from __future__ import annotations

import numpy as np

from svg import curves
from ultrascale import Cluster, Job, Model
from ultrascale.cost import cheatsheet
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.network import Op, group, wire_bytes
from ultrascale.plan import survey

COLLECTIVES: tuple[tuple[Op, int], ...] = (
    ("all_reduce", 8),
    ("all_gather", 8),
    ("all_to_all", 8),
    ("all_reduce", 64),
    ("all_to_all", 64),
)


def make_job(model: str, cluster: str, seq: int, sequences: int) -> Job:
    return Job(model=Model.load(model), cluster=Cluster.load(cluster), seq=seq, batch_tokens=seq * sequences)


def scaling() -> str:
    most = 256
    job = make_job("llama-3.2-1b", f"{most}xh100", 4096, 4 * most)
    series: dict[str, list[tuple[float, float]]] = {}
    for point in survey.scaling(job, most):
        if point.estimate is not None:
            series.setdefault(point.technique, []).append((point.gpus, point.estimate.tokens_per_s_per_gpu))
    ticks = {float(gpus): f"{gpus}" for gpus in (1, 2, 4, 8, 16, 32, 64, 128, 256)}
    title = f"Llama-3.2-1B, each technique alone, {survey.SEQUENCES_PER_GPU} sequences of 4,096 tokens a GPU"
    return curves(title, series, "H100 GPUs, nodes of 8", "tokens/s/GPU", ticks, mark=(8, "a node"))


def matmuls() -> str:
    """The matmul rates that estimates use."""
    tokens = 2 ** np.arange(8, 16)
    series: dict[str, list[tuple[float, float]]] = {}
    job = make_job("llama-3-8b", "8xh100", 8192, 8)
    for precision in ("fp8", "bf16"):
        machine = ClusterRates(job.changed(precision=precision))
        for width in (4096, 1024):
            wide = np.full_like(tokens, width)
            rates = 2 * tokens * width**2 / machine.matmul_s(tokens, wide, wide) / 1e12
            series[f"{precision}, {width:,} × {width:,}"] = list(zip(tokens.tolist(), rates.tolist(), strict=True))
    ticks = {float(count): f"{count:,}" for count in tokens}
    title = "A matmul on an H100 within a training step, by its rows and the size of its weight"
    peak = job.peak_flops / 1e12
    return curves(title, series, "rows: tokens of a micro-batch", "TFLOP/s", ticks, level=(peak, f"bf16 peak: {peak:,.0f}"))


def collectives() -> str:
    machine = ClusterRates(make_job("llama-3-8b", "64xh100", 8192, 64))
    sizes = 2.0 ** np.arange(16, 33, 2)
    series: dict[str, list[tuple[float, float]]] = {}
    for op, count in COLLECTIVES:
        ranks = np.full(len(sizes), count)
        seconds = machine.collective_s(op, sizes, group(ranks, np.ones_like(ranks), machine.cluster))
        sent = wire_bytes(op, sizes, ranks)
        series[f"{op} on {count}"] = list(zip(sizes.tolist(), (sent / seconds / 1e9).tolist(), strict=True))
    ticks = {float(size): f"{size / 2**20:,.10g}" for size in sizes}
    return curves("Bytes a GPU sends over the time it takes, H100 in nodes of 8", series, "buffer, MiB", "GB/s", ticks)


def overlap() -> str:
    tokens = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    series: dict[str, list[tuple[float, float]]] = {}
    peak = make_job("llama-3-8b", "8xh100", 8192, 8).peak_flops
    for place, bandwidth in (("NVLink", 450e9), ("network", 50e9)):
        series[f"DP, {place}"] = [(n, cheatsheet.data_ratio(64, 1.0, n, peak, bandwidth).corrected) for n in tokens]
        series[f"ZeRO-2, {place}"] = [(n, cheatsheet.zero_2_ratio(64, 1.0, n, peak, bandwidth).corrected) for n in tokens]
    ticks = {float(count): f"{count:,}" for count in tokens}
    title = "Transfer over computing, 64 H100: below 1 the reduction of gradients can hide"
    unit = "tokens of a rank's last micro-batch"
    return curves(title, series, unit, "ratio", ticks, level=(1, "1"), top=5.0)
