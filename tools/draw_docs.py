"""Draw the pictures of the documents from the matmul's own numbers: estimates, action lists, masks, fitted surfaces.

python tools/draw_docs.py [-o docs/pictures]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from draw_laws import collectives, make_job, matmuls, overlap, scaling
from draw_shapes import context_masks, pipeline
from svg import Bar, stacked
from ultrascale import Estimate, Layout, estimate
from ultrascale.figures import style
from ultrascale.figures.plan import COMMUNICATION
from ultrascale.measure.compare import TIMES
from ultrascale.specs.estimate import CAUSES, OWNERS
from ultrascale.specs.units import GIB


def owners(found: Estimate) -> dict[str, float]:
    memory = found.memory[found.peak_stage].memory
    return {owner: getattr(memory, owner) / GIB for owner in OWNERS}


def memory_bar(name: str, found: Estimate, under: str) -> Bar:
    return Bar(name, owners(found), f"{found.peak_gib:,.0f} GiB", under)


def capacity(found: Estimate) -> tuple[float, str]:
    return found.capacity_gib, f"H100: {found.capacity_gib:,.0f} GiB"


def recomputation() -> str:
    bars = []
    for seq, words in ((4096, "4k"), (16384, "16k"), (65536, "64k")):
        job = make_job("llama-3.2-1b", "1xh100", seq, 1)
        plain = estimate(job, Layout()).step_time_s
        for policy in ("none", "selective", "full"):
            found = estimate(job, Layout(recompute=policy))
            bars.append(memory_bar(f"{words} {policy}", found, f"{found.step_time_s / plain - 1:+.0%} time"))
    title = "Llama-3.2-1B on one H100: memory by owner, one sequence at a time"
    return stacked(title, bars, style.OWNER_COLORS, "GiB", capacity(found))


def accumulation() -> str:
    bars, job = [], make_job("llama-3.2-1b", "1xh100", 4096, 16)
    for mbs in (16, 8, 4, 2, 1):
        found = estimate(job, Layout(mbs=mbs, gas=16 // mbs))
        bars.append(memory_bar(f"mbs {mbs} × gas {16 // mbs}", found, f"{found.tokens_per_s_per_gpu:,.0f} tokens/s"))
    title = "The same 16 sequences of 4,096 tokens in ever smaller micro-batches: Llama-3.2-1B on one H100"
    return stacked(title, bars, style.OWNER_COLORS, "GiB", capacity(found))


def data_parallelism() -> str:
    bars = []
    for gpus in (8, 64, 512):
        job = make_job("llama-3.2-1b", f"{gpus}xh100", 4096, 16 * gpus)
        for variant in ("naive", "hooks", "bucketed"):
            found = estimate(job, Layout(dp=gpus, mbs=4, gas=4, data_parallel=variant))
            takes, exposed = sum(one.time_s for one in found.traffic) * 1e3, found.time.data_s * 1e3
            parts = {"exposed": exposed, "hidden behind the last backward": max(0.0, takes - exposed)}
            bars.append(Bar(f"{gpus} {variant}", parts, f"{exposed:.1f} ms exposed", f"of {found.step_time_s * 1e3:,.0f} ms"))
    colours = {"exposed": style.COLORS["communication"], "hidden behind the last backward": style.COLORS["computing"]}
    return stacked("The gradient reduction of a step: Llama-3.2-1B on 8, 64 and 512 H100", bars, colours, "ms")


def zero_stages() -> str:
    bars = []
    for gpus in (8, 64):
        job = make_job("llama-3-8b", f"{gpus}xh100", 8192, 4 * gpus)
        for stage in range(4):
            found = estimate(job, Layout(dp=gpus, zero=stage, gas=4, recompute="selective"))
            sent = sum(one.bytes for one in found.traffic) / GIB
            bars.append(memory_bar(f"dp {gpus} ZeRO-{stage}", found, f"sends {sent:,.0f} GiB"))
    title = "Llama-3-8B, sequences of 8,192, 4 micro-batches: memory by owner, and what a GPU sends in a step"
    return stacked(title, bars, style.OWNER_COLORS, "GiB", capacity(found))


def time_parts(found: Estimate, separate_attention: bool = False) -> dict[str, float]:
    """Seconds of a step in groups of causes."""
    causes = TIMES["computing"][1]
    computing = [cause for cause in causes if not (separate_attention and cause == "attention_s")]
    rest = [cause for cause in CAUSES if cause not in (*causes, *COMMUNICATION)]
    groups = {"computing": computing, "exposed communication": COMMUNICATION, "bubble, optimizer, host": rest}
    if separate_attention:
        groups = {"attention": ["attention_s"], **groups}
    return {name: sum(getattr(found.time, cause) for cause in group) for name, group in groups.items()}


TIME_COLOURS = {
    "attention": style.COLORS["forward"],
    "computing": style.COLORS["computing"],
    "exposed communication": style.COLORS["communication"],
    "bubble, optimizer, host": style.COLORS["host"],
}


def tensor() -> str:
    bars, job = [], make_job("llama-3-70b", "64xh100", 8192, 512)
    for tp in (1, 2, 4, 8, 16, 32):
        found = estimate(job, Layout(dp=64 // tp, tp=tp, zero=1, gas=8 * tp, recompute="selective"))
        bars.append(Bar(f"tp {tp}", time_parts(found), f"{found.step_time_s:,.0f} s", f"{found.peak_gib:,.0f} GiB per GPU"))
    title = "Llama-3-70B on 64 H100 in nodes of 8, 512 sequences of 8,192: a step by cause"
    return stacked(title, bars, TIME_COLOURS, "s")


def context_variants() -> str:
    bars, job = [], make_job("llama-3-8b", "8xh100", 131072, 8)
    for variant in ("allgather", "ring", "zigzag", "ulysses"):
        found = estimate(job, Layout(cp=8, zero=1, gas=8, context_parallel=variant, recompute="full"))
        parts, under = time_parts(found, separate_attention=True), f"{found.peak_gib:.1f} GiB per GPU"
        bars.append(Bar(variant, parts, f"{found.step_time_s:,.1f} s", under))
    title = "Llama-3-8B on 8 H100, cp 8, sequences of 131,072, full recomputation: a step by cause"
    return stacked(title, bars, TIME_COLOURS, "s")


def expert() -> str:
    bars, job = [], make_job("mixtral-8x7b", "64xh100", 8192, 256)
    for ep in (1, 2, 4, 8):
        found = estimate(job, Layout(dp=64, ep=ep, zero=1, gas=4, recompute="full"))
        share = found.time.expert_s / found.step_time_s
        bars.append(memory_bar(f"ep {ep}", found, f"all-to-all {share:.1%} of a step"))
    title = "Mixtral-8x7B on 64 H100, ZeRO-1, full recomputation: memory by owner"
    return stacked(title, bars, style.OWNER_COLORS, "GiB", capacity(found))


PICTURES: dict[str, Callable[[], str]] = {
    "recomputation": recomputation,
    "accumulation": accumulation,
    "data": data_parallelism,
    "zero": zero_stages,
    "tensor": tensor,
    "context-masks": context_masks,
    "context-ways": context_variants,
    "pipeline": pipeline,
    "expert": expert,
    "scaling": scaling,
    "matmuls": matmuls,
    "collectives": collectives,
    "overlap": overlap,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent.parent / "docs" / "pictures")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8")
    print(f"wrote {len(PICTURES)} pictures to {folder}")


if __name__ == "__main__":
    main()
