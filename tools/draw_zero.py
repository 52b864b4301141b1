"""Draw the README's picture: memory by owner of one model under ZeRO 0 to 3, from the cost model itself.

python tools/draw_zero.py [-o docs/zero.svg]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ultrascale import Cluster, Estimate, Job, Layout, Model, estimate
from ultrascale.figures import style
from ultrascale.specs.estimate import OWNERS
from ultrascale.specs.units import GIB

WIDTH, HEIGHT, LEFT, BASE, TOP = 800, 380, 60, 310, 40


def estimates() -> list[tuple[str, Estimate]]:
    job = Job(model=Model.load("llama-3-8b"), cluster=Cluster.load("8xh100"), seq=8192, batch_tokens=2**20)
    rows = [(f"ZeRO-{level}", Layout(dp=8, zero=level, mbs=1, gas=16)) for level in range(4)]
    rows.append(("ZeRO-3, full recompute", Layout(dp=8, zero=3, mbs=1, gas=16, recompute="full")))
    return [(name, estimate(job, layout)) for name, layout in rows]


def bar(x: int, width: int, name: str, one: Estimate, scale: float) -> list[str]:
    shapes, level = [], float(BASE)
    for owner in OWNERS:
        height = getattr(one.memory[0].memory, owner) / GIB * scale
        level -= height
        shapes.append(
            f'<rect x="{x}" y="{level:.1f}" width="{width}" height="{height:.1f}" fill="{style.OWNER_COLORS[owner]}"/>'
        )
    verdict = "fits" if one.fits else "does not fit"
    halo = 'paint-order="stroke" stroke="white" stroke-width="4"'
    label = f"{one.peak_gib:.0f} GiB, {verdict}"
    shapes.append(f'<text x="{x + width / 2}" y="{level - 6:.1f}" text-anchor="middle" {halo}>{label}</text>')
    shapes.append(f'<text x="{x + width / 2}" y="{BASE + 18}" text-anchor="middle">{name}</text>')
    speed = f"{one.tokens_per_s_per_gpu:,.0f} tokens/s/GPU" if one.fits else "–"
    shapes.append(f'<text x="{x + width / 2}" y="{BASE + 34}" text-anchor="middle" fill="#666">{speed}</text>')
    return shapes


def draw() -> str:
    rows = estimates()
    capacity = rows[0][1].capacity_gib
    scale = (BASE - TOP - 20) / max(one.peak_gib for _, one in rows)
    line = BASE - capacity * scale
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="15">Llama-3-8B on 8 H100, sequences of 8,192: memory of one GPU by owner</text>',
    ]
    parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{line:.1f}" y2="{line:.1f}" stroke="black" stroke-dasharray="6 4"/>')
    parts.append(f'<text x="{LEFT - 6}" y="{line + 4:.1f}" text-anchor="end">{capacity:.0f} GiB</text>')
    for position, (name, one) in enumerate(rows):
        parts += bar(LEFT + 10 + position * 145, 110, name, one, scale)
    for position, owner in enumerate(OWNERS):
        x = LEFT + position * 104
        parts.append(f'<rect x="{x}" y="{HEIGHT - 22}" width="12" height="12" fill="{style.OWNER_COLORS[owner]}"/>')
        parts.append(f'<text x="{x + 16}" y="{HEIGHT - 12}">{owner}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent.parent / "docs" / "zero.svg")
    arguments = parser.parse_args()
    arguments.output.write_text(draw(), encoding="utf-8")
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
