"""Accelerate, DeepSpeed and megatron-core rehearsed on a GPU, beside rehearsals without one and the estimate.

The layouts are those of tools/fit_frameworks.py, whose rehearsals without a GPU are in data/rehearsals. Lines of JSON are
appended as layouts end, and a layout that has a peak there is not run again. Times are comparable with `--parallel 1` alone.

    python benchmarks/gpu/engines.py -o gpu.json --engines accelerate deepspeed megatron-local --seconds 500
    python benchmarks/gpu/engines.py --compare gpu.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from foreign import Room, lines_of
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools"))
from fit_frameworks import GRIDS, Case, difference, request_of, stored
from ultrascale.measure.foreign.request import ENGINES
from ultrascale.measure.foreign.run import rehearse_foreign
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.framework import Framework
from ultrascale.specs.units import GIB

STEPS = 8  # four to warm up, three measured; the last, which only counts operators, is not run
CAPACITY_GIB = 130  # of an H200's 139, for all that run at a time
LARGER, CONTEXT_GIB = 1.3, 4  # a process may need this multiple of the rehearsed peak while it builds its model; CUDA's own
LIBRARIES = [name for name in GRIDS if ENGINES[Framework.load(name).engine].library]


def measured(preset: str, case: Case, timeout_s: float) -> dict[str, object]:
    """The line of a layout."""
    line: dict[str, object] = {"layout": f"{preset}: {case}"}
    with TemporaryDirectory(prefix="ultrascale-") as folder:
        try:
            asked = request_of(preset, case, Path(folder))
            found = rehearse_foreign(replace(asked, device="cuda", steps=STEPS, count=False), timeout_s)
        except (RunError, SpecError) as failed:
            return line | {"error": str(failed).replace(folder, "")}
    assert found.step_s is not None
    return line | {
        "peak_bytes": found.peak, "ms": found.step_s * 1e3, "engine": found.engine, "torch": found.torch, "gpu": found.gpu,
        "seconds": round(found.seconds, 1), "notes": found.notes,
    }  # fmt: skip


def run(out: Path, presets: list[str], only: str, parallel: int, timeout_s: float, seconds: float) -> None:
    """Engines in turns, for at most so many seconds: a run that is ended early has some of all."""
    known = {line["layout"] for line in lines_of(out) if "peak_bytes" in line} if out.exists() else set()
    rehearsed = {f"{preset}: {case}": found.peak / GIB for preset in presets for case, found in stored(preset)}
    turns = sorted((turn, preset, case) for preset in presets for turn, case in enumerate(map(str, GRIDS[preset])))
    cases = {f"{preset}: {case}": (preset, case) for preset in presets for case in GRIDS[preset]}
    chosen = [f"{preset}: {case}" for _, preset, case in turns]
    left = [name for name in chosen if only in name and name not in known]
    room, writing, started = Room(CAPACITY_GIB), threading.Lock(), time.monotonic()

    def one(name: str) -> None:
        need = rehearsed[name] * LARGER + CONTEXT_GIB if name in rehearsed else CAPACITY_GIB
        with room.taken(need):
            left_s = seconds - (time.monotonic() - started)
            if left_s < timeout_s / 4:
                return
            line = measured(*cases[name], min(timeout_s, left_s))
        with writing, out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        peak = line.get("peak_bytes")
        result = f"{peak / GIB:.2f} GiB, {line['ms']:.1f} ms" if isinstance(peak, int) else str(line["error"])
        print(f"{time.monotonic() - started:5.0f} s  {name}: {result}", flush=True)

    print(f"{len(left)} of {len(chosen)} layouts to rehearse, {parallel} at a time", flush=True)
    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(one, left))


def compare(file: Path) -> None:
    """Peaks of the GPU beside those without one and the estimate's; a difference is relative to the GPU's."""
    found = {line["layout"]: line for line in lines_of(file)}
    console = Console(width=96)
    for preset in LIBRARIES:
        table = Table(title=f"{preset}, GiB at the peak", show_edge=False)
        for heading in ("layout", "GPU", "rehearsed", "difference", "estimate", "difference", "step ms"):
            table.add_column(heading, justify="left" if heading == "layout" else "right", no_wrap=heading != "layout")
        apart: dict[str, list[float]] = {"rehearsed": [], "estimate": []}
        for case, here in stored(preset):
            line = found.get(f"{preset}: {case}", {})
            guess = here.peak * (1 + difference(Framework.load(preset), case, here).peak)
            cells = ["failed" if "error" in line else ""] if "peak_bytes" not in line else [f"{line['peak_bytes'] / GIB:.2f}"]
            for which, value in (("rehearsed", here.peak), ("estimate", guess)):
                cells.append(f"{value / GIB:.2f}")
                cells.append(f"{value / line['peak_bytes'] - 1:+.1%}" if "peak_bytes" in line else "")
                if "peak_bytes" in line:
                    apart[which].append(abs(value / line["peak_bytes"] - 1))
            table.add_row(str(case), *cells, f"{line['ms']:.1f}" if "ms" in line else "")
        if apart["rehearsed"]:
            console.print(table)
            for which, values in apart.items():
                mean = f"mean difference {statistics.mean(values):.2%}, worst {max(values):.1%}"
                console.print(f"{which}: {len(values)} layouts, {mean}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", "-o", type=Path, help="lines of JSON; those of layouts that it has are not run again")
    parser.add_argument("--engines", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--only", default="", help="layouts whose names contain this")
    parser.add_argument("--parallel", type=int, default=4, help="layouts at a time, as far as they fit a GPU together")
    parser.add_argument("--timeout", type=float, default=150, help="seconds for a layout")
    parser.add_argument("--seconds", type=float, default=3600, help="for all of them; those that are left are not begun")
    parser.add_argument("--compare", type=Path, metavar="GPU.JSON")
    options = parser.parse_args()
    if options.compare:
        compare(options.compare)
    elif options.out is None:
        sys.exit("--out is missing: name the file for results, such as -o gpu.json")
    else:
        run(options.out, options.engines, options.only, options.parallel, options.timeout, options.seconds)


if __name__ == "__main__":
    main()
