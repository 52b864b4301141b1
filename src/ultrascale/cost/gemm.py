"""How long one matrix product takes: fitted surfaces of time by shape, per GPU kind and dtype.

For C[m, n] = A[m, k] · B[k, n], with P the peak, S the multiprocessors, W the memory bandwidth:

    tiles   = ⌈m/tile_m⌉ · ⌈n/tile_n⌉
    waves   = (1 − wave_share) · tiles/S + wave_share · ⌈tiles/S⌉          a last wave that is partly empty
    ideal   = waves · S · 2 · tile_m · tile_n · (k + k_ramp) / P           k_ramp: prologue and epilogue of a tile
    compute = ideal / peak_fraction · (1 + throttle · ideal / (ideal + throttle_s))
    memory  = (bytes of A, B and C) / (bandwidth_fraction · W)
    time    = launch_s + max(compute, memory) + overlap_loss · min(compute, memory) [+ quantisation, fp8 only]

`throttle` is the clock that drops when large products draw the full power budget: without it products with m, n and k
of 8192 and more come out 8 % too fast in bf16 and 24 % in fp8 (H100). Measured alone, a short product is over before the
clock drops; in a training step one product follows another and they share one clock, so `steady` gives each the drop of a
product of STEADY_S, whatever its own length. The measured fp8 rows include the dynamic
quantisation of A, a pass that reads 2 bytes and writes 1 per element. All coefficients are fractions, elements or
seconds, so a relative may borrow a surface with its own peak, bandwidth and multiprocessors. Fitted by
tools/fit_surfaces.py; residuals stand in surfaces/gemm.json and docs/kernels.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ultrascale.specs.errors import SpecError, nearest

Floats = NDArray[np.float64]

# fp16 runs on the same tensor cores at the same rate as bf16; only bf16 was measured.
_SAME_SURFACE = {"fp16": "bf16"}
_OUTPUT_BYTES = 2.0  # both measured dtypes write bf16
# m = n = k = 8192 at the peak of an H100: the largest products that most training steps hold.
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
    """One GPU kind's matrix products in one dtype, with what is known of the fit's error (fractions, not percent)."""

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


@lru_cache(maxsize=1)
def _tables() -> dict[str, Any]:
    text = resources.files("ultrascale.cost").joinpath("surfaces/gemm.json").read_text(encoding="utf-8")
    tables: dict[str, Any] = json.loads(text)
    return tables


def available() -> tuple[tuple[str, str], ...]:
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
    known = [f"{known_gpu} {known_dtype}" for known_gpu, known_dtype in available()]
    raise SpecError(f"no matrix-product surface for {gpu_table} in {dtype}; {nearest(' '.join(key), known)}")


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
    products among others, as in a training step; `ramp` is a share of k_ramp.
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


def gemm_efficiency(
    surface: Surface,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    *,
    peak_tflops: float,
    memory_bandwidth_gb_s: float,
    multiprocessors: float,
    quantize: bool = True,
) -> Floats:
    """The fraction of the peak that a product reaches: 2·m·n·k / time / peak."""
    time = gemm_time_s(
        surface,
        m,
        n,
        k,
        peak_tflops=peak_tflops,
        memory_bandwidth_gb_s=memory_bandwidth_gb_s,
        multiprocessors=multiprocessors,
        quantize=quantize,
    )
    flops = 2.0 * np.asarray(m, dtype=np.float64) * np.asarray(n) * np.asarray(k)
    return np.asarray(flops / (time * (peak_tflops * 1e12)), dtype=np.float64)


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
