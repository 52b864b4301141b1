"""What nvidia-smi tells of GPUs and of the links between them, read without touching a GPU."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

ASK_S = 10.0  # of nvidia-smi, which may hang with its driver
NO_GPU = "No devices were found"
_GPU_FIELDS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.free")


@dataclass(frozen=True)
class GPUFact:
    index: str
    name: str
    driver: str
    memory_bytes: float
    free_bytes: float


def _ask(*words: str) -> tuple[str, str]:
    """What a program answers, and what went wrong; both empty where there is no such program."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=ASK_S, check=False)
    except subprocess.TimeoutExpired:
        return "", f"{words[0]} did not answer in {ASK_S:.0f} s"
    except OSError:
        return "", ""
    if done.returncode:
        told = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        return "", f"{words[0]}: {told[0][:160]}"
    return done.stdout, ""


def ask_gpus(visible: str | None) -> tuple[tuple[GPUFact, ...], str]:
    answer, problem = _ask("nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits")
    return parse_gpus(answer, visible), "" if NO_GPU in problem else problem


def parse_gpus(answer: str, visible: str | None = None) -> tuple[GPUFact, ...]:
    """nvidia-smi's table, of which a process sees those that CUDA_VISIBLE_DEVICES names."""
    rows = [
        [cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.count(",") == len(_GPU_FIELDS) - 1
    ]
    chosen = None if visible is None else [word.strip() for word in visible.split(",") if word.strip()]
    return tuple(
        GPUFact(index, name, driver, _mib(total), _mib(free))
        for index, uuid, name, driver, total, free in rows
        if chosen is None or index in chosen or any(uuid.startswith(word) for word in chosen if not word.isdigit())
    )


def ask_clocks(uuid: str) -> tuple[float, float] | None:
    """MHz of a GPU's multiprocessors now and at most."""
    return parse_clocks(
        _ask("nvidia-smi", f"--id=GPU-{uuid}", "--query-gpu=clocks.sm,clocks.max.sm", "--format=csv,noheader,nounits")[0]
    )


def parse_clocks(answer: str) -> tuple[float, float] | None:
    cells = [cell.strip() for cell in answer.strip().split(",")]
    if len(cells) != 2 or not all(cell.isdigit() and int(cell) for cell in cells):  # some kinds answer "[N/A]"
        return None
    return float(cells[0]), float(cells[1])


def _mib(text: str) -> float:
    return float(text) * 2**20 if text.replace(".", "", 1).isdigit() else 0.0


def ask_links() -> dict[tuple[str, str], str]:
    return parse_links(_ask("nvidia-smi", "topo", "-m")[0])


def parse_links(matrix: str) -> dict[tuple[str, str], str]:
    """`nvidia-smi topo -m`: a row and a column for each GPU; other columns are network cards and cores."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split("\t") for line in matrix.splitlines()]
    rows = [[cell.strip() for cell in line] for line in lines]
    columns = next((row[1:] for row in rows if "GPU0" in row[1:]), [])
    return {
        (row[0], column): cell
        for row in rows
        if re.fullmatch(r"GPU\d+", row[0])
        for column, cell in zip(columns, row[1:], strict=False)
        if re.fullmatch(r"GPU\d+", column) and int(row[0][3:]) < int(column[3:])
    }
