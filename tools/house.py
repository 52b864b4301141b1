"""Prints the size and shape of the package: lines and files by room, class names used twice, facts stated twice."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "ultrascale"
ENGINE_AND_PLANNER = ("specs", "schedules", "cost", "plan", "model", "parallel", "train")
SCHEDULES = ("zero-bubble", "zb-v", "dualpipe-v", "interleaved", "afab")


def main() -> None:
    files = {file: file.read_text(encoding="utf-8") for file in sorted(SOURCE.rglob("*.py"))}
    lines, counts = Counter[str](), Counter[str]()
    for file, text in files.items():
        room = file.relative_to(SOURCE).parts[0] if file.parent != SOURCE else "."
        lines[room] += text.count("\n")
        counts[room] += 1
    print(f"{'room':12} {'files':>6} {'lines':>7}")
    for room, count in sorted(lines.items(), key=lambda item: -item[1]):
        print(f"{room:12} {counts[room]:6} {count:7,}")
    print(f"{'src':12} {len(files):6} {sum(lines.values()):7,}")
    print(f"engine and planner: {sum(lines[room] for room in ENGINE_AND_PLANNER):,} lines")
    names = Counter(
        node.name for text in files.values() for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)
    )
    twice = sorted(name for name, count in names.items() if count > 1)
    print(f"class names used more than once: {len(twice)} {' '.join(twice)}")
    named = [str(file.relative_to(SOURCE)) for file, text in files.items() if names_a_schedule(text)]
    print(f"files that name a schedule in code: {len(named)} {' '.join(named)}")


def names_a_schedule(text: str) -> bool:
    constants = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return any(value in SCHEDULES for value in constants if isinstance(value, str))


if __name__ == "__main__":
    main()
