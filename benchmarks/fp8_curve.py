"""Does fp8 train as well? `python benchmarks/fp8_curve.py [--steps 300] [-o docs/fp8_curve.svg]`

Trains a small model on the text of Python's standard library in bf16 (in fp32 on a CPU) and in fp8 with each scaling: the same
first weights, the same tokens in the same order. Prints how far the smoothed losses part, relative to bf16's, and draws them.
`--control` adds bf16 with a learning rate that differs in its sixth digit: so far do two curves part by chance. `--seeds 8`
trains each eight times, with other weights and another order, and compares the means: chance averages out, a bias does not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from ultrascale import Cluster, Job, Layout, Model
from ultrascale.data.corpora import corpus
from ultrascale.launch import local
from ultrascale.launch.machine import gpu_names
from ultrascale.parallel.mesh import Mesh
from ultrascale.specs.training import Training
from ultrascale.train.build import build_engine
from ultrascale.train.data import Batches

WINDOW = 20  # steps whose mean is one point of a smoothed curve
BOUND = 0.005  # how far fp8 may be from bf16
# Okabe and Ito's palette, as in tools/draw_zero.py.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#999999")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, MIDDLE, BASE = 800, 520, 60, 780, 40, 300, 480

Curves = Mapping[str, Sequence[float]]


class Run(NamedTuple):
    """One of the curves; `rate` times the learning rate."""

    name: str
    precision: str
    scaling: str = "tensor"
    rate: float = 1.0


def train(run: Run, seed: int, options: argparse.Namespace) -> list[float]:
    """The loss of every step, in a process of its own."""

    def rank(_: int, __: int, ___: str) -> list[float]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = Model(
            name="small",
            layers=options.layers,
            hidden=options.hidden,
            heads=options.hidden // 64,
            kv_heads=options.hidden // 64,
            ffn=3 * options.hidden,
            vocab=256,
        )
        # Rows and blocks would be compiled, which takes longer than so few small steps do.
        kernels = "fused" if run.scaling == "tensor" else "eager"
        tokens = options.batch * options.seq
        job = Job(model=model, cluster=Cluster.load("1xh200"), seq=options.seq, batch_tokens=tokens, precision=run.precision)
        training = Training(
            steps=options.steps,
            lr=run.rate * options.lr,
            warmup_steps=options.warmup,
            seed=seed,
            data="stdlib",
            fp8_scaling=run.scaling,
            fp8_keep=options.keep,
            kernels=kernels,
        )
        batches = Batches(corpus(training, model.vocab), job.seq, options.batch, training.seed)
        engine = build_engine(job, Mesh.build(Layout(mbs=options.batch), model.kv_heads, 0, device), training, batches)
        return [engine.step(number).loss for number in range(options.steps)]

    (losses,) = local.run(rank, 1)
    return list(losses)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Means of so many steps, the last of which is the point's own."""
    return [sum(losses[end - WINDOW : end]) / WINDOW for end in range(WINDOW, len(losses) + 1)]


def relative_difference(curves: Curves, name: str, beside: str) -> list[float]:
    """The relative difference of two smoothed curves, point by point."""
    pairs = zip(smoothed(curves[name]), smoothed(curves[beside]), strict=True)
    return [one / other - 1 for one, other in pairs]


def show(curves: Curves, title: str) -> None:
    plain, *others = curves
    table = Table(title=title)
    for heading in ("matmuls", "largest difference %", "mean %", "last smoothed loss"):
        table.add_column(heading, justify="left" if heading == "matmuls" else "right")
    table.add_row(plain, "", "", f"{smoothed(curves[plain])[-1]:.4f}")
    for name in others:
        far = [abs(one) for one in relative_difference(curves, name, plain)]
        table.add_row(name, f"{100 * max(far):.2f}", f"{100 * sum(far) / len(far):.2f}", f"{smoothed(curves[name])[-1]:.4f}")
    Console(width=120).print(table)


def line(points: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def axis(y: float, label: str) -> str:
    return (
        f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    )


def draw(curves: Curves, title: str) -> str:
    """Smoothed losses above, their differences from the first curve below."""
    plain, *others = curves
    points = len(smoothed(curves[plain]))
    across = [LEFT + (RIGHT - LEFT) * number / max(1, points - 1) for number in range(points)]
    every = [loss for losses in curves.values() for loss in smoothed(losses)]
    low, high = min(every), max(every)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{title}</text>',
    ]

    def up(loss: float) -> float:
        return MIDDLE - 20 - (loss - low) / (high - low) * (MIDDLE - 20 - TOP)

    def below(difference: float) -> float:
        return (MIDDLE + 20 + BASE) / 2 - difference / (2 * BOUND) * (BASE - MIDDLE - 20) / 2

    parts += [axis(up(low + part * (high - low) / 4), f"{low + part * (high - low) / 4:.2f}") for part in range(5)]
    parts += [axis(below(part * BOUND), f"{100 * part * BOUND:+.1f} %") for part in (-2, -1, 0, 1, 2)]
    for number, (name, colour) in enumerate(zip(curves, COLOURS, strict=False)):
        parts.append(line(list(zip(across, map(up, smoothed(curves[name])), strict=True)), colour))
        x = LEFT + 145 * number
        parts.append(f'<rect x="{x}" y="{HEIGHT - 22}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{HEIGHT - 12}">{name}</text>')
        if name in others:
            shown = [max(-2 * BOUND, min(2 * BOUND, one)) for one in relative_difference(curves, name, plain)]
            parts.append(line(list(zip(across, map(below, shown), strict=True)), colour))
    steps = [WINDOW, (WINDOW + len(curves[plain])) // 2, len(curves[plain])]
    for step, at in zip(steps, (LEFT, (LEFT + RIGHT) / 2, RIGHT), strict=True):
        parts.append(f'<text x="{at}" y="{BASE + 14}" text-anchor="middle">step {step}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 64; of 512 for blocks to be in fp8")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32, help="sequences in a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, help="steps of a rising rate; default: the engine's")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, whose mean is the curve")
    parser.add_argument("--keep", choices=("ends", "head", "none"), default="ends")
    parser.add_argument("--scalings", nargs="+", choices=("tensor", "row", "block"), default=["tensor", "row", "block"])
    parser.add_argument("--control", action="store_true", help="the wide curve once more, the rate times 1.00001")
    parser.add_argument("-o", "--output", type=Path, default=Path("fp8_curve.svg"), help="the picture; losses go beside it")
    options = parser.parse_args()
    gpus = gpu_names()  # asked for without CUDA, which must not be touched before the processes are forked
    wide = "bf16" if gpus else "fp32"
    runs = [Run(wide, wide), *(Run(f"fp8 by {scaling}", "fp8", scaling) for scaling in options.scalings)]
    if options.control:
        runs.append(Run(f"{wide}, rate · 1.00001", wide, rate=1.00001))
    where = gpus[0] if gpus else "CPU"
    size = f"{options.layers} × {options.hidden}, {options.batch} × {options.seq} bytes a step, keep {options.keep}"
    losses_by_run: dict[str, list[list[float]]] = {run.name: [] for run in runs}
    for seed in range(options.seeds):  # shown and written after each seed: an interrupted run has results too
        for run in runs:
            began = time.monotonic()
            losses_by_run[run.name].append(train(run, seed, options))
            print(f"seed {seed}, {run.name}: {options.steps} steps in {time.monotonic() - began:.0f} s", flush=True)
        curves = {
            name: [sum(losses) / len(losses) for losses in zip(*each, strict=True)] for name, each in losses_by_run.items()
        }
        title = f"{where} · torch {torch.__version__} · {datetime.date.today()} · {size}"
        title += f", mean of {seed + 1} seeds" if seed else ""
        show(curves, title)
        options.output.write_text(draw(curves, title), encoding="utf-8")
        options.output.with_suffix(".json").write_text(json.dumps(curves), encoding="utf-8")
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
