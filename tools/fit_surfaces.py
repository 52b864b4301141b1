"""Fit the matmul and collective surfaces that the package ships, from tables of kernel measurements.

    python tools/fit_surfaces.py TABLES_DIR [-o src/ultrascale/cost/surfaces]

TABLES_DIR holds gemm.parquet (gpu, dtype, m, n, k, latency_ms) and nccl.parquet (gpu, nccl, op, dtype, num_gpus,
message_size, latency_ms). The laws are the package's own functions, so what is fitted is what is evaluated. Every step
is deterministic. Needs the `tools` extra.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from ultrascale.cost.kernels import Coefficients, Surface, gemm_time_s
from ultrascale.cost.network import SWITCH_REDUCES_FROM, Link, collective_time_s

SOURCE = "ai-dynamo/aiconfigurator (Apache-2.0) kernel measurements, made for inference engines"

# Dense TFLOP/s in bf16 and fp8, memory GB/s, multiprocessors, NVLink GB/s per direction, from the data sheets. The
# fractions that are fitted are relative to these. gb300's matmuls repeat b300's rows and are left out.
HARDWARE: dict[str, tuple[float, float, float, int, float]] = {
    "a100": (312.0, 0.0, 2039.0, 108, 300.0),
    "h100": (989.4, 1978.9, 3352.0, 132, 450.0),
    "h200": (989.4, 1978.9, 4800.0, 132, 450.0),
    "b200": (2250.0, 4500.0, 8000.0, 148, 900.0),
    "b300": (2250.0, 4500.0, 8000.0, 148, 900.0),
    "gb200": (2500.0, 5000.0, 8000.0, 148, 900.0),
}
NVLINK_ONLY = {"gb300": 900.0}
DTYPES = {"bfloat16": "bf16", "fp8": "fp8"}
OPS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}

# Start, lower and upper bound of each continuous coefficient. Fractions of bandwidth stop at 1: what small matmuls
# gain from the cache must not be lent to large ones.
GEMM_BOUNDS: dict[str, tuple[float, float, float]] = {
    "launch_s": (4e-6, 0.5e-6, 2e-5),
    "peak_fraction": (0.85, 0.3, 1.0),
    "bandwidth_fraction": (0.8, 0.3, 1.0),
    "wave_share": (0.5, 1e-3, 1.0),
    "k_ramp": (100.0, 1.0, 1000.0),
    "overlap_loss": (0.3, 1e-3, 1.0),
    "throttle": (0.1, 1e-3, 3.0),
    "throttle_s": (1e-3, 1e-5, 1e-1),
    "quantize_bandwidth_fraction": (0.7, 0.1, 1.0),
}
TILES = (64, 128, 256)
NCCL_BOUNDS: dict[str, tuple[float, float, float]] = {
    "bandwidth_fraction": (0.8, 0.1, 1.5),
    "base_s": (6e-6, 1e-6, 5e-5),
    "latency_s": (5e-7, 1e-8, 2e-5),
    "fill_s": (1e-5, 1e-7, 1e-3),
    "copy": (0.3, 1e-2, 3.0),
}


def solve(
    bounds: dict[str, tuple[float, float, float]],
    predict: Callable[[dict[str, float]], np.ndarray],
    measured: np.ndarray,
    weight: np.ndarray,
) -> tuple[float, dict[str, float]]:
    """Weighted least squares on log time, in log coefficients; errors above 5 % count linearly (soft_l1), so that
    outliers (one row in ten is off by more than 15 % on H200 and B200) do not pull the surface."""
    names = list(bounds)
    start, low, high = (np.log([bounds[name][i] for name in names]) for i in range(3))
    root = np.sqrt(weight)

    def residual(x: np.ndarray) -> np.ndarray:
        return np.asarray(root * np.log(predict(dict(zip(names, np.exp(x), strict=True))) / measured))

    found = least_squares(residual, start, bounds=(low, high), loss="soft_l1", f_scale=0.05, max_nfev=100)
    return float(found.cost), {name: float(f"{value:.5g}") for name, value in zip(names, np.exp(found.x), strict=True)}


def training_rows(table: pd.DataFrame) -> np.ndarray:
    """The part of the table that training uses."""
    return np.asarray((table.m >= 2048) & (table.n >= 1024) & (table.k >= 1024))


def gemm_surface(gpu: str, dtype: str, coefficients: Coefficients, **known: Any) -> Surface:
    bf16, fp8, memory, multiprocessors, _ = HARDWARE[gpu]
    blank = dict.fromkeys(("residual_median", "residual_p90", "training_residual_median", "training_residual_p90"), 0.0)
    fields: dict[str, Any] = {**blank, "rows": 0, "measured_range": {}, **known}
    hardware = (fp8 if dtype == "fp8" else bf16, memory, multiprocessors)
    names = ("peak_tflops", "memory_bandwidth_gb_s", "multiprocessors")
    fields.update(zip(names, hardware, strict=True))
    return Surface(gpu=gpu, dtype=dtype, coefficients=coefficients, source=SOURCE, **fields)


def gemm_predict(surface: Surface, table: pd.DataFrame) -> np.ndarray:
    m, n, k = (table[name].to_numpy(np.float64) for name in "mnk")
    return gemm_time_s(
        surface,
        m,
        n,
        k,
        peak_tflops=surface.peak_tflops,
        memory_bandwidth_gb_s=surface.memory_bandwidth_gb_s,
        multiprocessors=surface.multiprocessors,
    )


def fit_gemm(gpu: str, dtype: str, table: pd.DataFrame) -> Coefficients:
    """Every tile shape with its best continuous coefficients; the best of them.

    Training's shapes weigh 4 times the others. Rows with m = 256·i + 1 weigh a quarter: a training micro-batch never
    has them, and 2049 rows instead of 2048 cost 35 % more in the median on H100 in fp8.
    """
    measured = table.latency_ms.to_numpy(np.float64) / 1e3
    weight = np.where(training_rows(table), 1.0, 0.25) * np.where(table.m % 2 == 0, 1.0, 0.25)
    bounds = dict(GEMM_BOUNDS)
    if dtype != "fp8":
        del bounds["quantize_bandwidth_fraction"]
    best: tuple[float, Coefficients] | None = None
    for tile_m in TILES:
        for tile_n in TILES:

            def build(x: dict[str, float], tile_m: int = tile_m, tile_n: int = tile_n) -> Coefficients:
                return Coefficients(**{"quantize_bandwidth_fraction": 1.0, **x}, tile_m=tile_m, tile_n=tile_n)

            def predict(x: dict[str, float], build: Callable[[dict[str, float]], Coefficients] = build) -> np.ndarray:
                return gemm_predict(gemm_surface(gpu, dtype, build(x)), table)

            cost, x = solve(bounds, predict, measured, weight)
            if best is None or cost < best[0]:
                best = (cost, build(x))
    assert best is not None
    return best[1]


def errors(predicted: np.ndarray, measured: np.ndarray) -> tuple[float, float, float]:
    """Median and 90th percentile of |predicted/measured − 1|, and its signed median (the bias)."""
    relative = predicted / measured - 1.0
    return float(np.median(abs(relative))), float(np.quantile(abs(relative), 0.9)), float(np.median(relative))


def roughness(table: pd.DataFrame) -> float:
    """How far a measured time lies from the geometric mean of its two neighbours in k: no smooth law can do better."""
    ordered = table[training_rows(table)].sort_values(["m", "n", "k"])
    log_rate = np.log(ordered.m.astype(np.float64) * ordered.n * ordered.k / ordered.latency_ms)
    groups = log_rate.groupby([ordered.m, ordered.n])
    return float((log_rate - (groups.shift(1) + groups.shift(-1)) / 2.0).abs().median())


def held_out(gpu: str, dtype: str, table: pd.DataFrame) -> tuple[float, float, float]:
    """Fit on 80 % of the (n, k) pairs, score training's shapes on the rest."""
    pairs = (table.n.astype(np.int64) * 1_000_000 + table.k).to_numpy()
    unique = np.unique(pairs)
    kept = np.isin(pairs, np.random.default_rng(0).permutation(unique)[: int(0.8 * len(unique))])
    surface = gemm_surface(gpu, dtype, fit_gemm(gpu, dtype, table[kept]))
    rest = table[~kept & training_rows(table)]
    return errors(gemm_predict(surface, rest), rest.latency_ms.to_numpy(np.float64) / 1e3)


def fit_all_gemm(table: pd.DataFrame) -> list[dict[str, Any]]:
    print("| GPU | dtype | rows | all: median, p90, bias | training | training, even m | held out | roughness |")
    print("|---|---|---|---|---|---|---|---|")
    surfaces = []
    for gpu in HARDWARE:
        for table_dtype, dtype in DTYPES.items():
            rows = table[(table.gpu.str.removesuffix("_sxm") == gpu) & (table.dtype == table_dtype)]
            if rows.empty:
                continue
            coefficients = fit_gemm(gpu, dtype, rows)
            predicted = gemm_predict(gemm_surface(gpu, dtype, coefficients), rows)
            measured = rows.latency_ms.to_numpy(np.float64) / 1e3
            used = training_rows(rows)
            even = used & (rows.m % 2 == 0).to_numpy()
            scores = [errors(predicted[part], measured[part]) for part in (np.full(len(rows), True), used, even)]
            scores.append(held_out(gpu, dtype, rows))
            cells = " | ".join(f"{100 * a:.1f} {100 * b:.1f} {100 * c:+.1f}" for a, b, c in scores)
            print(f"| {gpu} | {dtype} | {len(rows)} | {cells} | {100 * roughness(rows):.1f} |", flush=True)
            surface = gemm_surface(
                gpu,
                dtype,
                coefficients,
                residual_median=round(scores[0][0], 4),
                residual_p90=round(scores[0][1], 4),
                training_residual_median=round(scores[1][0], 4),
                training_residual_p90=round(scores[1][1], 4),
                rows=len(rows),
                measured_range={name: (int(rows[name].min()), int(rows[name].max())) for name in "mnk"},
            )
            surfaces.append({key: value for key, value in asdict(surface).items() if key != "source"})
    return surfaces


def fit_fabric(gpu: str, nvlink_gb_s: float, table: pd.DataFrame) -> dict[str, Any]:
    """One link per collective, from the newest NCCL; messages of 1 MiB and more weigh 4 times the others.

    Only the rows in half: the switch does not add int8, whose all_reduce on 8 H100s ends at 351 GB/s instead of 445.
    `message_size` counts elements of the full buffer for every collective: read so, bus bandwidths stay below NVLink's,
    but for 460 of 450 GB/s where H200's switch does the all_reduce.
    """
    newest = max(table.nccl.unique(), key=lambda version: [int(part) for part in version.split(".")])
    table = table[(table.nccl == newest) & (table.dtype == "half")]
    fits = {}
    for table_op, op in OPS.items():
        rows = table[table.op == table_op]
        size = 2.0 * rows.message_size.to_numpy(np.float64)
        n = rows.num_gpus.to_numpy(np.float64)
        measured = rows.latency_ms.to_numpy(np.float64) / 1e3
        large = size >= 2**20

        bounds = dict(NCCL_BOUNDS)
        if op == "all_reduce" and n.max() >= SWITCH_REDUCES_FROM:
            bounds["switch_gain"] = (1.1, 1.0, 1.6)

        def predict(x: dict[str, float], op: Any = op, size: np.ndarray = size, n: np.ndarray = n) -> np.ndarray:
            x = dict(x)
            link = Link(bandwidth_gb_s=x.pop("bandwidth_fraction") * nvlink_gb_s, **x)
            return collective_time_s(op, size, n, per_node=n, intra=link, inter=link)

        _, x = solve(bounds, predict, measured, np.where(large, 1.0, 0.25))
        every, big = errors(predict(x), measured), errors(predict(x)[large], measured[large])
        cells = " | ".join(f"{100 * a:.1f} {100 * b:.1f} {100 * c:+.1f}" for a, b, c in (every, big))
        print(f"| {gpu} | {newest} | {op} | {x['bandwidth_fraction'] * nvlink_gb_s:.0f} | {cells} |")
        fits[op] = {
            "switch_gain": 1.0,
            **x,
            "residual_median": round(every[0], 4),
            "residual_p90": round(every[1], 4),
            "large_residual_median": round(big[0], 4),
            "large_residual_p90": round(big[1], 4),
            "rows": len(rows),
        }
    return {
        "gpu": gpu,
        "nvlink_gb_s": nvlink_gb_s,
        "nccl": newest,
        "max_gpus": int(table.num_gpus.max()),
        "ops": fits,
    }


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps({"source": SOURCE, "fitted_by": "tools/fit_surfaces.py", **content}, indent=1) + "\n")
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables_dir", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("src/ultrascale/cost/surfaces"))
    arguments = parser.parse_args()

    print("Matrix matmuls, errors of time in %; roughness: distance of a point from its neighbours in k\n")
    surfaces = fit_all_gemm(pd.read_parquet(arguments.tables_dir / "gemm.parquet"))
    print("\nCollectives, errors of time in %; GB/s: bus bandwidth of endless messages\n")
    print("| GPU | NCCL | op | GB/s | all: median, p90, bias | 1 MiB and more |\n|---|---|---|---|---|---|")
    table = pd.read_parquet(arguments.tables_dir / "nccl.parquet")
    kinds = {**{gpu: facts[4] for gpu, facts in HARDWARE.items()}, **NVLINK_ONLY}
    by_kind = table.gpu.str.removesuffix("_sxm")
    fabrics = [fit_fabric(gpu, rate, table[by_kind == gpu]) for gpu, rate in kinds.items()]
    arguments.output.mkdir(parents=True, exist_ok=True)
    write(arguments.output / "gemm.json", {"surfaces": surfaces})
    write(arguments.output / "nccl.json", {"fabrics": fabrics})


if __name__ == "__main__":
    main()
