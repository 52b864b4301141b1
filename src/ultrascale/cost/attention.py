"""Attention's time: a fraction of peak by architecture, head size, how long the rows are and how many blocks they make."""

from __future__ import annotations

import numpy as np

from ultrascale.cost import flops
from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.passes import Passes
from ultrascale.specs.job import Job

# Flash attention computes five products in backward where forward has two (Dao 2023, section 3.2).
BACKWARD_FLOPS = 2.5
BLOCK = 128  # queries that one multiprocessor takes at a time
# Blocks' time that each multiprocessor stands idle, at the start and in a last wave that the causal mask leaves uneven: 1.42 in
# 15 timings of cuDNN's attention alone on an H200, which it brings from 5.0 to 1.0 % (flash: 1.64, 5.8 to 1.5 %; docs/lab.md).
LOST = 1.4
# torch's kernel on a CPU skips what the mask hides in whole blocks of so many keys.
KEYS = 512
# It takes queries by 32, from rows of 192 on by 64 and of 768 on by 256: a score of the first costs 1.4 times one of the second
# and of the last 0.9 times (heads of 8 to 128, two threads of a Xeon; docs/time.md).
QUERIES = ((192, 1.4), (768, 1.0), (float("inf"), 0.9))
# What a score costs beside its products: made again in backward, and its gradient beside it (the same timings).
SCORES_BACKWARD = 2.6


def head_size_factor(head_dim: int, small_heads: float) -> float:
    """Small heads leave the matrix units waiting for softmax: what 64 gets of 128, and in between a straight line."""
    return min(1.0, max(0.3, small_heads + (1 - small_heads) * (head_dim - 64) / 64))


def filled(machine: ClusterRates, blocks: Array | float) -> Array | float:
    """Share of the multiprocessors' time that so many blocks of queries fill; all of it where no number of them is known."""
    return blocks / (blocks + LOST * (machine.gpu.multiprocessors or 0))


def imbalance(columns: LayoutColumns) -> Array:
    """Slowest cp rank over the mean under the causal mask: contiguous slices of the ring give the last rank 2 − 1/cp."""
    contiguous = columns.is_("context_parallel", "ring")
    return np.where(contiguous & (columns.cp > 1), 2 - 1 / columns.cp, 1.0)


def passes(job: Job, columns: LayoutColumns, machine: ClusterRates) -> Passes:
    """Seconds of one layer's attention on one rank; there are no weights, so no weight gradient."""
    tokens = columns.tokens(job.seq)
    work = flops.score_flops(job.model, job.seq, causal=True) * tokens / columns.tp * imbalance(columns)
    zero = np.zeros_like(work)
    if job.attention == "plain":
        return _plain(job, columns, machine, work, zero)
    if machine.efficiency.synchronous:
        return _on_host(job, machine, work, zero)
    # Ring steps see a block of the sequence at a time; the others see whole rows.
    ring = columns.is_("context_parallel", "ring") | columns.is_("context_parallel", "zigzag")
    row = np.where(ring, job.seq / columns.cp, job.seq)
    if job.model.sliding_window:
        row = np.minimum(row, job.model.sliding_window)
    rate = machine.attention
    blocks = tokens * job.model.heads / columns.tp / BLOCK
    reach = row / (row + rate.half_row) * head_size_factor(job.model.qk_head_dim, rate.small_heads) * filled(machine, blocks)
    peak = machine.attention_peak_flops
    return Passes(work / (peak * rate.forward * reach), BACKWARD_FLOPS * work / (peak * rate.backward * reach), zero)


def done_flops(job: Job, columns: LayoutColumns) -> Array:
    """Of one layer's attention on one rank, forward and backward, with what its kernel computes again."""
    work = flops.score_flops(job.model, job.seq, causal=True) * columns.tokens(job.seq) / columns.tp
    return np.asarray((1 + BACKWARD_FLOPS) * work)


def _on_host(job: Job, machine: ClusterRates, work: Array, zero: Array) -> Passes:
    """On a CPU: the products, and what a score costs however narrow a head is, its exponential and passes through a cache."""
    each = 2.0 * (job.model.qk_head_dim + job.model.v_head_dim)
    seen = flops.score_flops(job.model, job.seq, causal=True) / (each * job.model.heads)
    computed = work * min(job.seq, seen + KEYS / 2) / seen
    slower = next(factor for row, factor in QUERIES if job.seq < row)
    softmax = slower * computed / each / (machine.efficiency.softmax_gscores_s * 1e9)
    peak, rate = machine.attention_peak_flops, machine.attention
    forward = slower * computed / (peak * rate.forward) + softmax
    backward = slower * BACKWARD_FLOPS * computed / (peak * rate.backward) + SCORES_BACKWARD * softmax
    return Passes(forward, backward, zero)


def _plain(job: Job, columns: LayoutColumns, machine: ClusterRates, work: Array, zero: Array) -> Passes:
    """Whole score matrices: batched products at half the peak, and passes of scale, mask, softmax (and dropout) over them."""
    scores = columns.tokens(job.seq) * job.seq * job.model.heads / columns.tp
    full_work = 2 * work  # without a kernel that skips it, the masked half is computed too
    each_pass = machine.stream_s(4.0 * scores)
    # Written by the first product and read by the second: one pass. Softmax: one more, or scale, mask and softmax apart.
    softmax = ((2 if job.framework.attention == "plain-fused" else 4) + job.dropout) * each_pass
    products = full_work / (0.5 * machine.attention_peak_flops)
    return Passes(products + softmax, 2 * products + 1.5 * softmax, zero)
