"""Facts about this machine for `doctor`, in some seconds, without torch and without touching a GPU.

What cannot be queried (no nvidia-smi, no /sys, no /dev/shm) stays empty; nothing raises.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path

from ultrascale.kernels import optional_kernels, timing_cache
from ultrascale.launch.machine import cores, memory_bytes
from ultrascale.specs.errors import os_reason

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
    """Output and problem of a program; both empty where it does not exist."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=ASK_S, check=False)
    except subprocess.TimeoutExpired:
        return "", f"{words[0]} did not answer in {ASK_S:.0f} s"
    except OSError:
        return "", ""
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        return "", f"{words[0]}: {lines[0][:160]}"
    return done.stdout, ""


def ask_gpus(visible: str | None) -> tuple[tuple[GPUFact, ...], str]:
    answer, problem = _ask("nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits")
    return parse_gpus(answer, visible), "" if NO_GPU in problem else problem


def parse_gpus(answer: str, visible: str | None = None) -> tuple[GPUFact, ...]:
    """Rows of nvidia-smi's table that CUDA_VISIBLE_DEVICES selects."""
    rows = [
        [cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.count(",") == len(_GPU_FIELDS) - 1
    ]
    selected = None if visible is None else [word.strip() for word in visible.split(",") if word.strip()]
    return tuple(
        GPUFact(index, name, driver, _mib(total), _mib(free))
        for index, uuid, name, driver, total, free in rows
        if selected is None or index in selected or any(uuid.startswith(word) for word in selected if not word.isdigit())
    )


def ask_clocks(uuid: str) -> tuple[float, float] | None:
    """Current and highest clock of a GPU's multiprocessors, in MHz."""
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


PACKAGES = (
    "torch",
    "numpy",
    "pydantic",
    "safetensors",
    "tokenizers",
    "pyarrow",
    *(one.name for one in optional_kernels.PACKAGES),
)
IMPORT_S = 60.0  # more than a slow disk takes for torch and an optional package
MOST_WRITTEN, BLOCK, LONGEST_S = 64 * 2**20, 4 * 2**20, 1.0  # of the test of the disk
_USED = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class Disk:
    """Where runs are written."""

    place: str
    free_bytes: float
    problem: str = ""
    write_bytes_s: float | None = None
    clock_ahead_s: float = 0.0
    """clock of the disk minus this machine's: a shared disk has the clock of another machine"""


@dataclass(frozen=True)
class MachineFacts:
    python: str = ""
    packages: Mapping[str, str | None] = field(default_factory=dict)
    """version, or None where it is not installed"""
    import_problems: Mapping[str, str] = field(default_factory=dict)
    """optional kernel packages that are installed but cannot be imported, and why"""
    timed_shapes: int = 0
    """shapes whose kernels earlier runs have timed on these GPUs with these packages"""
    torch_cuda: str | None = None
    """the CUDA that torch was built for"""
    cores: int = 1
    memory_bytes: float = 0.0
    free_memory_bytes: float = 0.0
    gpus: tuple[GPUFact, ...] = ()
    gpu_problem: str = ""
    links: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """between two GPUs, in nvidia-smi's words: NV18, PIX, SYS …"""
    infiniband: Mapping[str, str] = field(default_factory=dict)
    """device and port -> state and rate"""
    interfaces: tuple[str, ...] = ()
    """network interfaces that are up"""
    loopback_problem: str = ""
    host_problem: str = ""
    master_problem: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    """what torchrun, Slurm, NCCL and gloo read"""
    open_files: int = 0
    shared_memory_bytes: float | None = None
    disk: Disk = Disk("", 0.0)
    now_s: float = 0.0
    newest_file_s: float = 0.0
    """of this package: a correct clock shows no earlier time"""


def gather(place: Path = Path("runs"), say: Callable[[str], None] = lambda _: None) -> MachineFacts:
    say("asking for packages, cores and memory")
    environment = {name: value for name, value in os.environ.items() if _is_launchers(name)}
    packages = {name: _version(name) for name in PACKAGES}
    say("asking nvidia-smi for GPUs")
    gpus, gpu_problem = ask_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    links = ask_links() if len(gpus) > 1 else {}
    # Only with a GPU: without one, some packages cannot be imported at all.
    tried = [one for one in optional_kernels.PACKAGES if gpus and packages[one.name] is not None]
    if tried:
        say(f"importing {' and '.join(one.name for one in tried)}")
    problems = {one.name: problem for one in tried if (problem := try_import(one.module))}
    timings = timing_cache.load()
    say("trying the network")
    master = environment.get("MASTER_ADDR")
    host_problem = resolves(socket.gethostname())
    master_problem = resolves(master) if master else ""
    loopback_problem = try_loopback()
    say("writing a small file where runs go")
    return MachineFacts(
        python=platform.python_version(),
        packages=packages,
        import_problems=problems,
        timed_shapes=sum(len(timings.get(timing_cache.environment(name), {})) for name in {gpu.name for gpu in gpus}),
        torch_cuda=torch_cuda(),
        cores=cores(),
        memory_bytes=memory_bytes(),
        free_memory_bytes=free_memory(),
        gpus=gpus,
        gpu_problem=gpu_problem,
        links=links,
        infiniband=infiniband(),
        interfaces=interfaces(),
        loopback_problem=loopback_problem,
        host_problem=host_problem,
        master_problem=master_problem,
        environment=environment,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shared_memory_bytes=float(shutil.disk_usage("/dev/shm").total) if os.path.isdir("/dev/shm") else None,
        disk=try_disk(place),
        now_s=time.time(),
        newest_file_s=max(file.stat().st_mtime for file in Path(__file__).parent.glob("*.py")),
    )


def _is_launchers(name: str) -> bool:
    starts = ("SLURM_", "NCCL_SOCKET_", "GLOO_SOCKET_", "MASTER_", "LOCAL_")
    return name in ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES") or name.startswith(starts)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def try_import(module: str, within_s: float = IMPORT_S) -> str:
    """Why the module cannot be imported, or ""; in a process of its own, since it loads torch and may crash."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, errors="replace", timeout=within_s
        )
    except subprocess.TimeoutExpired:
        return f"it was not imported in {within_s:.0f} s"
    except OSError as error:
        return f"Python cannot be started ({error.strerror or error})"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1][:200] if lines else f"Python ended with {done.returncode}"


def torch_cuda() -> str | None:
    """From torch's version file, since importing torch takes seconds."""
    found = util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    file = Path(found.origin).with_name("version.py")
    match = re.search(r"^cuda\b.*=\s*'([^']+)'", file.read_text(encoding="utf-8"), re.MULTILINE) if file.is_file() else None
    return match[1] if match else None


def free_memory() -> float:
    """Available without swapping, or what is left of a control group's limit if that is less."""
    least = memory_bytes()
    meminfo = _text("/proc/meminfo")
    if match := re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE):
        least = min(least, float(match[1]) * 1024)
    for limit, used in ((_text(limit), _text(used)) for limit, used in _USED):
        if limit.isdigit() and used.isdigit():
            least = min(least, max(0.0, float(limit) - float(used)))
    return least


def _text(file: str | Path) -> str:
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def infiniband(root: Path = Path("/sys/class/infiniband")) -> dict[str, str]:
    ports = sorted(root.glob("*/ports/*")) if root.is_dir() else []
    states = {f"{port.parent.parent.name}:{port.name}": (_text(port / "state"), _text(port / "rate")) for port in ports}
    return {name: f"{state.partition(': ')[2] or state}, {rate}" for name, (state, rate) in states.items()}


def interfaces(root: Path = Path("/sys/class/net")) -> tuple[str, ...]:
    """Those that are up, or `unknown` like loopback and tunnels."""
    if root.is_dir():
        return tuple(sorted(one.name for one in root.iterdir() if _text(one / "operstate") in ("up", "unknown")))
    return tuple(name for _, name in socket.if_nameindex())


def resolves(host: str, within_s: float = 2.0) -> str:
    """Why the name has no address, or ""; does not wait for a name server that is silent."""
    problem = [f"{host} was not resolved in {within_s:.0f} s"]

    def resolve() -> None:
        try:
            socket.getaddrinfo(host, None)
            problem[0] = ""
        except (OSError, UnicodeError) as error:
            problem[0] = f"{host} has no address ({getattr(error, 'strerror', None) or error})"

    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(within_s)
    return problem[0]


def try_loopback() -> str:
    """Send a byte through a free port, as processes of one machine do to connect."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2.0)
            with socket.create_connection(server.getsockname(), timeout=2.0) as client, server.accept()[0] as other:
                client.sendall(b"1")
                other.settimeout(2.0)
                return "" if other.recv(1) == b"1" else "a byte sent over 127.0.0.1 did not arrive"
    except OSError as error:
        return f"127.0.0.1 takes no connection ({error.strerror or error})"


def try_disk(place: Path) -> Disk:
    """Write at most 64 MiB for at most a second where runs go, and delete it."""
    folder = Path(os.path.abspath(place))
    while not os.path.isdir(folder) and folder != folder.parent:
        folder = folder.parent
    free = float(shutil.disk_usage(folder).free)
    most = min(MOST_WRITTEN, int(free / 4))
    block = os.urandom(BLOCK)  # so that a disk that compresses has no advantage
    written, start = 0, time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            while written + BLOCK <= most and time.perf_counter() - start < LONGEST_S:
                file.write(block)
                file.flush()
                os.fsync(file.fileno())
                written += BLOCK
            elapsed_s = time.perf_counter() - start
            os.utime(file.fileno())
            ahead = os.fstat(file.fileno()).st_mtime - time.time()
    except OSError as error:
        return Disk(str(folder), free, f"{folder} cannot be written ({os_reason(error)})")
    return Disk(str(folder), free, write_bytes_s=written / elapsed_s if written else None, clock_ahead_s=ahead)
