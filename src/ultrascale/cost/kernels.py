"""Time of GEMM and attention kernels: surfaces fitted to measured GEMMs, and attention as a share of the peak.

For C[m, n] = A[m, k] · B[k, n], with P the peak, S the multiprocessors, W the memory bandwidth:

    tiles   = ⌈m/tile_m⌉ · ⌈n/tile_n⌉
    waves   = (1 − wave_share) · tiles/S + wave_share · ⌈tiles/S⌉          a last wave that is partly empty
    ideal   = waves · S · 2 · tile_m · tile_n · (k + k_ramp) / P           k_ramp: prologue and epilogue of a tile
    compute = ideal / peak_fraction · (1 + throttle · ideal / (ideal + throttle_s))
    memory  = (bytes of A, B and C) / (bandwidth_fraction · W)
    time    = launch_s + max(compute, memory) + overlap_loss · min(compute, memory) [+ quantisation, fp8 only]

`throttle` is the clock that drops when large matmuls draw the full power budget: without it matmuls with m, n and k
of 8192 and more come out 8 % too fast in bf16 and 24 % in fp8 (H100). Measured alone, a short matmul is over before the
clock drops; in a training step one matmul follows another and they share one clock, so `steady` gives each the drop of a
matmul of STEADY_S, whatever its own length. The measured fp8 rows include the dynamic
quantisation of A, a pass that reads 2 bytes and writes 1 per element. All coefficients are fractions, elements or
seconds, so a relative may borrow a surface with its own peak, bandwidth and multiprocessors. Fitted by
tools/fit_surfaces.py; residuals stand in surfaces/gemm.json and docs/kernels.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ultrascale.cost import flops
from ultrascale.cost.columns import Array, LayoutColumns, Passes
from ultrascale.cost.memory.states import FP32, delta_rule_kernels
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.files import package_data
from ultrascale.specs.job import Job

if TYPE_CHECKING:
    from ultrascale.cost.hardware import ClusterRates


Floats = NDArray[np.float64]

# fp16 runs on the same tensor cores at the same rate as bf16; only bf16 was measured.
_SAME_SURFACE = {"fp16": "bf16"}
_OUTPUT_BYTES = 2.0  # both measured dtypes write bf16
# m = n = k = 8192 at the peak of an H100: the largest matmuls that most training steps hold.
STEADY_S = 1.1e-3


@dataclass(frozen=True)
class Coefficients:
    """The eleven numbers of one surface; the module's first lines give the law they belong to."""

    launch_s: float
    peak_fraction: float
    bandwidth_fraction: float
    tile_m: float
    tile_n: float
    wave_share: float
    k_ramp: float
    overlap_loss: float
    throttle: float
    throttle_s: float
    quantize_bandwidth_fraction: float


@dataclass(frozen=True)
class Surface:
    """One GPU kind's matmuls in one dtype, with what is known of the fit's error (fractions, not percent)."""

    gpu: str
    dtype: str
    coefficients: Coefficients
    residual_median: float
    residual_p90: float
    training_residual_median: float
    training_residual_p90: float
    rows: int
    measured_range: Mapping[str, tuple[float, float]]
    peak_tflops: float  # what the fit took for the hardware: peak_fraction and the others are relative to these
    memory_bandwidth_gb_s: float
    multiprocessors: float
    source: str


def _tables() -> Any:
    return package_data("ultrascale.cost", "surfaces/gemm.json")


def gemm_surfaces() -> tuple[tuple[str, str], ...]:
    """The (gpu, dtype) pairs that have a surface."""
    return tuple((row["gpu"], row["dtype"]) for row in _tables()["surfaces"])


@lru_cache(maxsize=64)
def load_surface(gpu_table: str, dtype: str) -> Surface:
    """The surface of a GPU kind ("h100"; "h100_sxm" is the same) in "bf16", "fp16" (uses bf16's) or "fp8"."""
    gpu = gpu_table.removesuffix("_sxm")
    key = (gpu, _SAME_SURFACE.get(dtype, dtype))
    for row in _tables()["surfaces"]:
        if (row["gpu"], row["dtype"]) == key:
            fields = dict(row)
            fields["coefficients"] = Coefficients(**row["coefficients"])
            fields["measured_range"] = {name: (low, high) for name, (low, high) in row["measured_range"].items()}
            return Surface(**fields, source=_tables()["source"])
    known = [f"{known_gpu} {known_dtype}" for known_gpu, known_dtype in gemm_surfaces()]
    raise SpecError(f"no matmul surface for {gpu_table} in {dtype}; {nearest(' '.join(key), known)}")


def gemm_time_s(
    surface: Surface,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    *,
    peak_tflops: float,
    memory_bandwidth_gb_s: float,
    multiprocessors: float,
    quantize: bool = True,
    steady: bool = False,
    ramp: float = 1.0,
) -> Floats:
    """Seconds of C[m, n] = A[m, k] · B[k, n]; m, n and k broadcast.

    `quantize=False` leaves out the fp8 quantisation of A, for callers that quantise once and multiply often; `steady` is for
    matmuls among others, as in a training step; `ramp` is a share of k_ramp.
    Scalars are folded first: this runs on arrays of 100k shapes, in 28 elementwise operations (fp8: 30).
    """
    c = surface.coefficients
    m, n, k = (np.asarray(x, dtype=np.float64) for x in (m, n, k))
    bandwidth = memory_bandwidth_gb_s * 1e9
    input_bytes = 1.0 if surface.dtype == "fp8" else 2.0

    tiles = np.ceil(m * (1.0 / c.tile_m)) * np.ceil(n * (1.0 / c.tile_n))
    waves = tiles * ((1.0 - c.wave_share) / multiprocessors) + c.wave_share * np.ceil(tiles * (1.0 / multiprocessors))
    wave_s_per_k = multiprocessors * 2.0 * c.tile_m * c.tile_n / (peak_tflops * 1e12)
    ideal = waves * (k * wave_s_per_k + ramp * c.k_ramp * wave_s_per_k)
    hot = STEADY_S / (STEADY_S + c.throttle_s) if steady else ideal / (ideal + c.throttle_s)
    compute = ideal * (1.0 / c.peak_fraction + (c.throttle / c.peak_fraction) * hot)

    byte_s = 1.0 / (c.bandwidth_fraction * bandwidth)
    memory = (m + n) * k * (input_bytes * byte_s) + m * n * (_OUTPUT_BYTES * byte_s)

    time = np.maximum(compute, memory) + c.overlap_loss * np.minimum(compute, memory) + c.launch_s
    if quantize and surface.dtype == "fp8":
        time = time + m * (k * (3.0 / (c.quantize_bandwidth_fraction * bandwidth)))
    return np.asarray(time, dtype=np.float64)


def outside_range(surface: Surface, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> str | None:
    """One sentence that names each dimension outside what was measured, or None; of an array, the farthest value."""
    found = []
    for name, values in (("m", m), ("n", n), ("k", k)):
        low, high = surface.measured_range[name]
        smallest, largest = float(np.min(values)), float(np.max(values))
        if largest > high:
            found.append(f"{name} = {largest:.0f} is beyond the measured {low:.0f}…{high:.0f}")
        if smallest < low:
            found.append(f"{name} = {smallest:.0f} is below the measured {low:.0f}…{high:.0f}")
    return "; ".join(found) or None


# ------------------------------------------------------------------------------------------------------------------ attention


@dataclass(frozen=True)
class AttentionRate:
    """Fraction of the bf16 peak for long causal rows and head size 128, and the row length at which half of it is reached."""

    forward: float
    backward: float
    half_row: float
    source: str
    small_heads: float = 0.75
    """head size 64 against 128"""


@cache
def attention_rates() -> dict[str, dict[str, AttentionRate]]:
    """Rates by kernel and architecture, each with its source (surfaces/attention.yaml)."""
    kernels = package_data("ultrascale.cost", "surfaces/attention.yaml")
    return {kernel: {name: AttentionRate(**fields) for name, fields in rates.items()} for kernel, rates in kernels.items()}


def attention_line(kernel: str, architecture: str) -> str:
    """The kernel whose rate is taken: its own, or the architecture's best where it has no line of its own."""
    return kernel if architecture in attention_rates().get(kernel, {}) else "flash"


def attention_rate(kernel: str, architecture: str) -> AttentionRate | None:
    return attention_rates()[attention_line(kernel, architecture)].get(architecture)


# Flash attention computes five matmuls in backward where forward has two (Dao 2023, section 3.2).
BACKWARD_FLOPS = 2.5
QUERY_BLOCK = 128  # queries that one multiprocessor takes at a time
# Blocks' time that each multiprocessor stands idle, at the start and in a last wave that the causal mask leaves uneven: 1.42 in
# 15 timings of cuDNN's attention alone on an H200, which it brings from 5.0 to 1.0 % (flash: 1.64, 5.8 to 1.5 %; docs/lab.md).
IDLE_BLOCKS = 1.4
# Of a gated delta rule, operator by operator, on an H200 (docs/lab.md): how often its forward reads or writes queries, keys,
# values and outputs in fp32, and launches of both passes for each 64 tokens; backward takes three times as long on the GPU.
DELTA_PASSES, DELTA_LAUNCHES = 48, (25, 90)
# By our kernels, there too: what forward reaches of the peak, and of its time what all chunks need together, µs of a chunk when
# few sequences pass their states on; the same of backward, relative to forward.
DELTA_RATE, DELTA_PARALLEL, DELTA_CHUNK_US = 0.044, (0.57, 2.07), (8.2, 10.0)
DELTA_BACKWARD = 2.65
# The same of a state space, operator by operator; not measured yet.
MAMBA_PASSES, MAMBA_LAUNCHES = 48, (25, 90)
# torch's kernel on a CPU skips what the mask hides in whole blocks of so many keys.
CPU_KEY_BLOCK = 512
# It takes queries by 32, from rows of 192 on by 64 and of 768 on by 256: a score of the first costs 1.4 times one of the second
# and of the last 0.9 times (heads of 8 to 128, two threads of a Xeon; docs/time.md).
CPU_QUERY_BLOCKS = ((192, 1.4), (768, 1.0), (float("inf"), 0.9))
# What a score costs beside its matmuls: made again in backward, and its gradient beside it (the same timings).
SCORES_BACKWARD = 2.6


def head_size_factor(head_dim: int, small_heads: float) -> float:
    """Small heads leave the matrix units waiting for softmax: what 64 gets of 128, and in between a straight line."""
    return min(1.0, max(0.3, small_heads + (1 - small_heads) * (head_dim - 64) / 64))


def sm_occupancy(machine: ClusterRates, blocks: Array | float) -> Array | float:
    """Share of the multiprocessors' time that so many blocks of queries fill; all of it where no number of them is known."""
    return blocks / (blocks + IDLE_BLOCKS * (machine.gpu.multiprocessors or 0))


def attention_imbalance(columns: LayoutColumns) -> Array:
    """Slowest cp rank over the mean under the causal mask: contiguous slices of the ring give the last rank 2 − 1/cp."""
    contiguous = columns.is_("context_parallel", "ring")
    return np.where(contiguous & (columns.cp > 1), 2 - 1 / columns.cp, 1.0)


def mixer_passes(job: Job, columns: LayoutColumns, machine: ClusterRates, kind: LayerKind) -> Passes:
    """Seconds of one layer's attention on one rank, or of what is in its place; there are no weights, so no weight gradient."""
    if kind.mixer == "linear":
        return linear_attention_passes(job, columns, machine)
    if kind.mixer == "mamba":
        return mamba_passes(job, columns, machine)
    return _attention_passes(job, columns, machine, kind.local) if kind.mixer == "attention" else Passes()


def linear_attention_passes(job: Job, columns: LayoutColumns, machine: ClusterRates) -> Passes:
    """Seconds of one gated delta rule on one rank: by our kernels, whose speed other engines' are taken to have; where these do
    not run, operator by operator in fp32 and again in backward.
    """
    linear, tokens = job.model.linear_attention, columns.tokens(job.seq) / columns.tp
    assert linear is not None
    chunks = job.seq / flops.DELTA_CHUNK
    if job.framework.exact_memory_trace and not delta_rule_kernels(job):
        width = linear.value_heads * (2 * linear.key_head_dim + 2 * linear.value_head_dim)
        forward = machine.stream_s(DELTA_PASSES * FP32 * tokens * width)
        launches = [count * machine.launch_s * chunks for count in DELTA_LAUNCHES]
        return Passes(np.maximum(forward, launches[0]), np.maximum(3 * forward, launches[1]))
    forward = flops.linear_attention_flops(job.model) * tokens / (DELTA_RATE * machine.attention_peak_flops)
    found = [
        np.maximum(whole * forward, parallel * forward + chunks * each / 1e6)
        for whole, parallel, each in zip((1, DELTA_BACKWARD), DELTA_PARALLEL, DELTA_CHUNK_US, strict=True)
    ]
    return Passes(*found)


def mamba_passes(job: Job, columns: LayoutColumns, machine: ClusterRates) -> Passes:
    """The same of one Mamba-2 layer's state space."""
    mamba = job.model.mamba
    assert mamba is not None
    plain, tokens = job.framework.exact_memory_trace, columns.tokens(job.seq) / columns.tp
    passes, width = (MAMBA_PASSES, 4) if plain else (1, 4 if job.precision == "fp32" else 2)
    forward = machine.stream_s(passes * width * tokens * 2 * (mamba.inner_dim + mamba.group_dim))
    if plain:
        launches = [count * machine.launch_s * job.seq / flops.DELTA_CHUNK for count in MAMBA_LAUNCHES]
        return Passes(np.maximum(forward, launches[0]), np.maximum(3 * forward, launches[1]))
    work = flops.mamba_flops(job.model) * tokens
    forward = np.maximum(forward, work / (DELTA_RATE * machine.attention_peak_flops))
    return Passes(forward, 2 * forward)


def _attention_passes(job: Job, columns: LayoutColumns, machine: ClusterRates, local: bool) -> Passes:
    tokens, each = columns.tokens(job.seq), flops.score_flops(job.model, job.seq, causal=True, local=local)
    work = each * tokens / columns.tp * attention_imbalance(columns)
    if job.attention == "plain":
        return _plain_attention(job, columns, machine, work)
    if machine.efficiency.synchronous:
        return _cpu_attention(job, machine, work, each)
    # Ring steps see a block of the sequence at a time; the others see whole rows.
    ring = columns.is_("context_parallel", "ring") | columns.is_("context_parallel", "zigzag")
    row = np.minimum(np.where(ring, job.seq / columns.cp, job.seq), flops.reach(job.model, job.seq, local))
    rate = machine.attention
    blocks = tokens * job.model.heads / columns.tp / QUERY_BLOCK
    reach = (
        row / (row + rate.half_row) * head_size_factor(job.model.qk_head_dim, rate.small_heads) * sm_occupancy(machine, blocks)
    )
    peak = machine.attention_peak_flops
    return Passes(work / (peak * rate.forward * reach), BACKWARD_FLOPS * work / (peak * rate.backward * reach))


def attention_flops(job: Job, columns: LayoutColumns, kind: LayerKind) -> Array:
    """Of one layer's attention on one rank, forward and backward, with what its kernel computes again."""
    work = flops.score_flops(job.model, job.seq, True, kind.local) * columns.tokens(job.seq) / columns.tp
    return np.asarray((kind.mixer == "attention") * (1 + BACKWARD_FLOPS) * work)


def _cpu_attention(job: Job, machine: ClusterRates, work: Array, work_of_token: float) -> Passes:
    """On a CPU: the matmuls, and what a score costs however narrow a head is, its exponential and passes through a cache."""
    each = 2.0 * (job.model.qk_head_dim + job.model.v_head_dim)
    attended = work_of_token / (each * job.model.heads)
    computed = work * min(job.seq, attended + CPU_KEY_BLOCK / 2) / attended
    slower = next(factor for row, factor in CPU_QUERY_BLOCKS if job.seq < row)
    softmax = slower * computed / each / (machine.efficiency.softmax_gscores_s * 1e9)
    peak, rate = machine.attention_peak_flops, machine.attention
    forward = slower * computed / (peak * rate.forward) + softmax
    backward = slower * BACKWARD_FLOPS * computed / (peak * rate.backward) + SCORES_BACKWARD * softmax
    return Passes(forward, backward)


def _plain_attention(job: Job, columns: LayoutColumns, machine: ClusterRates, work: Array) -> Passes:
    """Whole score matrices: batched matmuls at half the peak, and passes of scale, mask, softmax (and dropout) over them."""
    scores = columns.tokens(job.seq) * job.seq * job.model.heads / columns.tp
    full_work = 2 * work  # without a kernel that skips it, the masked half is computed too
    each_pass = machine.stream_s(4.0 * scores)
    # Written by the first matmul and read by the second: one pass. Softmax: one more, or scale, mask and softmax alone.
    softmax = ((2 if job.framework.attention == "plain-fused" else 4) + job.dropout) * each_pass
    matmuls = full_work / (0.5 * machine.attention_peak_flops)
    return Passes(matmuls + softmax, 2 * matmuls + 1.5 * softmax)
