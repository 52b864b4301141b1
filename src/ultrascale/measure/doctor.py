"""Doctor: what would stop a run, or a plan, on this machine; each finding follows from facts alone (doctor_facts.py)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ultrascale.cost.estimate import estimate
from ultrascale.kernels import timing_cache
from ultrascale.launch.machine import kind_of_gpu
from ultrascale.launch.rank_info import RankInfo, rank_info_from_env
from ultrascale.measure.doctor_facts import MachineFacts
from ultrascale.specs.checkpointing import Checkpointing
from ultrascale.specs.errors import SpecError
from ultrascale.specs.gpu import GPU
from ultrascale.specs.plan import Plan
from ultrascale.specs.training import Training
from ultrascale.specs.units import GIB
from ultrascale.train import supported

Level = Literal["ok", "warn", "bad"]
Verdict = tuple[Level, str] | tuple[Level, str, str]
"""of a check: level, text, and advice where something can be done"""

OLDEST_TORCH = (2, 11)
FEW_FILES, SMALL_SHM, SLOW_DISK = 1024, 1 * GIB, 50e6
LITTLE_DISK = 1 * GIB
SKEW_S, A_DAY_S = 5.0, 86_400.0


@dataclass(frozen=True)
class Finding:
    name: str
    level: Level
    text: str
    advice: str = ""
    """empty where nothing has to be done"""


def machine_findings(facts: MachineFacts) -> list[Finding]:
    return [Finding(name, *check(facts)) for name, check in MACHINE_CHECKS.items()]


def python(facts: MachineFacts) -> Verdict:
    names = ", ".join(f"{name} {version}" for name, version in facts.packages.items() if version and name != "torch")
    missing = [name for name, version in facts.packages.items() if version is None and name != "torch"]
    text = f"Python {facts.python}; {names or 'no packages'}"
    if "safetensors" in missing:
        return "warn", f"{text}; no safetensors, which convert needs", "pip install 'ultrascale[train]'"
    return "ok", text


def torch(facts: MachineFacts) -> Verdict:
    version = facts.packages.get("torch")
    if version is None:
        return "bad", "torch is not installed: plans can be made, not run", "pip install 'ultrascale[train]'"
    numbers = tuple(int(word) for word in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return "bad", f"torch {version} is older than {oldest}", f"pip install 'torch>={oldest}'"
    if facts.gpus and facts.torch_cuda is None:
        text = f"torch {version} was built without CUDA: the {len(facts.gpus)} GPUs here would stand idle"
        return "bad", text, "install torch from https://pytorch.org with the CUDA of the driver"
    return "ok", f"torch {version}, {f'CUDA {facts.torch_cuda}' if facts.torch_cuda else 'for CPUs'}"


def memory(facts: MachineFacts) -> Verdict:
    free, whole = facts.free_memory_bytes, facts.memory_bytes
    text = f"{facts.cores} cores, {free / GIB:,.1f} of {whole / GIB:,.1f} GiB of memory free"
    if free < 1 * GIB:
        return "warn", text, "end what holds the memory, or raise the control group's limit"
    return "ok", text


def gpus(facts: MachineFacts) -> Verdict:
    if facts.gpu_problem:
        return "warn", facts.gpu_problem, "see that the driver is loaded and fits nvidia-smi (reboot after updates)"
    if not facts.gpus:
        hidden = facts.environment.get("CUDA_VISIBLE_DEVICES")
        text = f"none, with CUDA_VISIBLE_DEVICES='{hidden}'" if hidden is not None else "none"
        return "ok", f"{text}: runs use the CPU"
    kinds = Counter(gpu.name for gpu in facts.gpus)
    least = min(facts.gpus, key=lambda gpu: gpu.free_bytes)
    named = " and ".join(f"{count} × {name}" for name, count in kinds.items())
    text = f"{named}, driver {facts.gpus[0].driver}, at least {least.free_bytes / GIB:,.1f} GiB free each"
    if len(kinds) > 1:
        return "warn", f"{text}: the slowest sets the pace", "choose one kind with CUDA_VISIBLE_DEVICES"
    if least.free_bytes < 0.9 * least.memory_bytes:
        text = f"{text}; GPU {least.index} has {least.free_bytes / GIB:,.1f} of {least.memory_bytes / GIB:,.1f} GiB"
        return "warn", text, "nvidia-smi shows which processes hold the rest"
    if _known_gpu(least.name) is None:
        return "warn", f"{text}; no peak of this kind is known", "give --cluster a file with its numbers"
    return "ok", text


def attention(facts: MachineFacts) -> Verdict:
    if facts.import_problems:
        broken = "; ".join(f"{name} cannot be imported ({why})" for name, why in facts.import_problems.items())
        advice = f"pip install --force-reinstall 'ultrascale[flash]', or pip uninstall {' '.join(facts.import_problems)}"
        return "warn", f"{broken}: runs use torch's kernels", advice
    timed = f"; {facts.timed_shapes} shapes timed before ({timing_cache.file()})" if facts.timed_shapes else ""
    version = facts.packages.get("flash-attn-4")
    if version is not None:
        return "ok", f"FlashAttention {version} where a run finds it faster than torch's kernels{timed}"
    kinds = filter(None, (_known_gpu(gpu.name) for gpu in facts.gpus))
    if any(kind.architecture in ("hopper", "blackwell") for kind in kinds):
        advice = "with FlashAttention 4 an H200 trained 2 to 5 % faster: pip install 'ultrascale[flash]'"
        return "ok", f"torch's kernels; {advice}{timed}"
    return "ok", f"torch's kernels{timed}"


def _known_gpu(name: str) -> GPU | None:
    try:
        return GPU.load(kind_of_gpu(name))
    except SpecError:
        return None


def links(facts: MachineFacts) -> Verdict:
    if len(facts.gpus) < 2:
        return "ok", "nothing to link"
    if not facts.links:
        return "warn", "nvidia-smi topo -m tells nothing of them", "run it to see why"
    slow = {pair: word for pair, word in facts.links.items() if not word.startswith("NV")}
    if not slow:
        words = ", ".join(sorted(set(facts.links.values())))
        return "ok", f"NVLink between all pairs ({words})"
    (one, other), word = next(iter(slow.items()))
    text = f"{len(slow)} of {len(facts.links)} pairs without NVLink, such as {one} and {other} ({word})"
    return "warn", text, "keep tensor parallelism inside pairs with NVLink"


def network(facts: MachineFacts) -> Verdict:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = facts.environment.get(name, "")
        exact = wanted.startswith("=") or name.startswith("GLOO")
        words = [word for word in wanted.lstrip("=").split(",") if word]
        if not words or wanted.startswith("^"):
            continue
        if not any(one == word or (not exact and one.startswith(word)) for one in facts.interfaces for word in words):
            text = f"{name} is '{wanted}' but the interfaces that are up are {', '.join(facts.interfaces)}"
            return "bad", text, f"unset {name}, or name one of these"
    outside = [name for name in facts.interfaces if name != "lo" and not name.startswith(("docker", "veth", "br-"))]
    active = [f"{name} ({state})" for name, state in facts.infiniband.items() if state.startswith("ACTIVE")]
    text = f"{', '.join(outside) or 'only loopback'}; InfiniBand: {', '.join(active) or 'none active'}"
    if facts.infiniband and len(active) < len(facts.infiniband):
        idle = next(f"{name} is {state}" for name, state in facts.infiniband.items() if not state.startswith("ACTIVE"))
        return "warn", f"{text}; {idle}", "see ibstat: hosts would talk over fewer links, or Ethernet"
    return "ok", text


def rendezvous(facts: MachineFacts) -> Verdict:
    if facts.loopback_problem:
        advice = "allow connections over the lo interface: processes of one machine meet there"
        return "bad", facts.loopback_problem, advice
    if facts.host_problem:
        advice = "give this host's name an address in /etc/hosts, or set GLOO_SOCKET_IFNAME"
        return "warn", f"this host's name {facts.host_problem}", advice
    return "ok", "127.0.0.1 takes connections, and a port is free"


def launcher(facts: MachineFacts) -> Verdict:
    given = facts.environment
    try:
        mine = launched(given)
    except SpecError as error:
        return "bad", str(error), "start with torchrun or srun, or unset these variables"
    if mine is None:
        if stray := [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in given]:
            text = f"{', '.join(stray)} set, but not all that torchrun sets: they are passed over"
            return "warn", text, f"unset {' '.join(stray)}, or start with torchrun"
        return "ok", "started by hand: train --nproc N starts processes here"
    text = f"process {mine.rank} of {mine.world}, {mine.local_world} on this host, meeting at {_address(mine, given)}"
    problem, advice = _launcher_problem(mine, facts)
    return ("bad", f"{text}; {problem}", advice) if problem else ("ok", text)


def launched(environment: Mapping[str, str]) -> RankInfo | None:
    """The rank that these variables give; SpecError where they contradict each other."""
    try:
        return rank_info_from_env(environment)
    except SpecError:
        raise
    except ValueError as error:
        raise SpecError(f"the environment's variables of Slurm cannot be read ({error}): start with srun") from None


def _address(mine: RankInfo, given: Mapping[str, str]) -> str:
    if mine.address != "env://":
        return mine.address.removeprefix("tcp://")
    return f"{given.get('MASTER_ADDR', '(no MASTER_ADDR)')}:{given.get('MASTER_PORT', '(no MASTER_PORT)')}"


def _launcher_problem(mine: RankInfo, facts: MachineFacts) -> tuple[str, str]:
    given, relaunch = facts.environment, "start with torchrun, which sets all of them"
    if mine.world > 1 and mine.address == "env://":
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not given.get(name):
                return f"{name} is not set, so the processes cannot meet", relaunch
    if facts.master_problem:
        return facts.master_problem, "set MASTER_ADDR to an address that every host can reach"
    if mine.local_rank >= mine.local_world:
        return f"LOCAL_RANK {mine.local_rank} is not below the {mine.local_world} processes of this host", relaunch
    if mine.world % mine.local_world:
        return f"{mine.world} processes do not divide into hosts of {mine.local_world}", "start as many on every host"
    if facts.gpus and mine.local_world > len(facts.gpus):
        return f"but there are {len(facts.gpus)} GPUs", f"start {len(facts.gpus)} processes on each host"
    return "", ""


def limits(facts: MachineFacts) -> Verdict:
    shm = facts.shared_memory_bytes
    text = f"{facts.open_files:,} open files; /dev/shm {'is missing' if shm is None else f'has {shm / GIB:,.2f} GiB'}"
    if 0 <= facts.open_files < FEW_FILES:
        return "warn", f"{text}: many processes need many connections", "ulimit -n 65536"
    if len(facts.gpus) > 1 and (shm or 0) < SMALL_SHM:
        return "warn", f"{text}: NCCL communicates through it inside a host", "docker run --shm-size=8g, or --ipc=host"
    return "ok", text


def disk(facts: MachineFacts) -> Verdict:
    found = facts.disk
    if found.problem:
        return "bad", found.problem, "give train --out a folder that can be written"
    speed = "" if found.write_bytes_s is None else f", written at {found.write_bytes_s / 1e6:,.0f} MB/s"
    text = f"{found.place}: {found.free_bytes / GIB:,.1f} GiB free{speed}"
    if found.free_bytes < LITTLE_DISK:
        return "warn", text, "make room, or give train --out another disk"
    if found.write_bytes_s is not None and found.write_bytes_s < SLOW_DISK:
        return "warn", f"{text}: checkpoints would take long", "give train --out a faster disk"
    return "ok", text


def clock(facts: MachineFacts) -> Verdict:
    skew_s, ahead = facts.newest_file_s - facts.now_s, facts.disk.clock_ahead_s
    if skew_s > A_DAY_S:
        text = f"the clock stands {skew_s / A_DAY_S:,.0f} days before this program was installed"
        return "warn", text, "set the clock: certificates, logs and the ages of checkpoints depend on it"
    if abs(ahead) > SKEW_S:
        text = f"the disk's clock is {ahead:+,.0f} s from this machine's"
        return "warn", text, "let both keep time by NTP: the ages of checkpoints depend on it"
    return "ok", "agrees with the disk's"


MACHINE_CHECKS: dict[str, Callable[[MachineFacts], Verdict]] = {
    "python": python,
    "torch": torch,
    "cpu and memory": memory,
    "GPUs": gpus,
    "attention": attention,
    "GPU links": links,
    "network": network,
    "rendezvous": rendezvous,
    "launcher": launcher,
    "limits": limits,
    "disk": disk,
    "clock": clock,
}


MASTER_BYTES = 4  # of a parameter in fp32, in the optimizer and in a checkpoint
RELATIVE_TOLERANCE = 1e-4  # a plan is written with six digits


def plan_findings(plan: Plan, facts: MachineFacts) -> list[Finding]:
    return [Finding(name, *check(plan, facts)) for name, check in PLAN_CHECKS.items()]


def plan_engine(plan: Plan, facts: MachineFacts) -> Verdict:
    """Whether the engine runs it at all."""
    try:
        supported.check(plan.job, plan.layout, Training())
    except SpecError as error:
        return "bad", str(error), "change the plan as it says, or plan anew"
    return "ok", f"{plan.job.model.name}, {plan.layout}: the engine runs it"


def plan_estimate(plan: Plan, facts: MachineFacts) -> Verdict:
    try:
        now = estimate(plan.job, plan.layout)
    except SpecError as error:
        return "bad", f"nothing can be predicted for its layout: {error}", "plan anew"
    for what, unit, written, predicted in (
        ("a step of", "s", plan.estimate.step_time_s, now.step_time_s),
        ("a peak of", "GiB", plan.estimate.peak_gib, now.peak_gib),
    ):
        if abs(written - predicted) > RELATIVE_TOLERANCE * predicted:
            text = f"the file says {what} {written:,.4g} {unit} but {predicted:,.4g} {unit} is predicted now"
            return "warn", text, "it was edited or comes from another version: plan anew"
    return "ok", f"{now.step_time_s:,.3g} s a step, {now.peak_gib:,.1f} GiB: as the file says"


def plan_processes(plan: Plan, facts: MachineFacts) -> Verdict:
    """One process per rank of the layout: those that a launcher started, or one for each GPU."""
    needed, nodes = plan.layout.gpus, plan.job.cluster.nodes
    mine = _rank_info(facts)
    if mine is None and not facts.gpus:
        text = f"{needed} processes on {facts.cores} cores"
        if needed > facts.cores:
            return "warn", f"{text}: they take turns", f"plan for {facts.cores}xhere"
        return "ok", text
    here = mine.world if mine else len(facts.gpus)
    whose = "processes started" if mine else "GPUs here"
    if here == needed or (mine is None and here > needed):
        return "ok", f"{needed} needed, {here} {whose}"
    if mine is None and nodes > 1 and here == plan.job.cluster.gpus_per_node:
        start = f"torchrun --nnodes {nodes} --nproc-per-node {here} -m ultrascale train plan.yaml"
        return "ok", f"{here} GPUs, as each of the {nodes} hosts must have: {start}, on each"
    layout = plan.layout
    sum_ = f"layout.dp·tp·pp·cp is {layout.dp}·{layout.tp}·{layout.pp}·{layout.cp} = {needed} but there are {here} {whose}"
    return "bad", sum_, _layouts_that_work(plan, here) or f"start {needed} processes"


def _layouts_that_work(plan: Plan, here: int) -> str:
    cluster = plan.job.cluster.model_copy(update={"nodes": 1, "gpus_per_node": here})
    found = supported.suggestions(plan.job.changed(cluster=cluster), plan.layout, Training())
    return f"with {here} these work: {found}" if found else ""


def _rank_info(facts: MachineFacts) -> RankInfo | None:
    try:
        return launched(facts.environment)
    except SpecError:  # the check of the launcher reports it
        return None


def plan_device(plan: Plan, facts: MachineFacts) -> Verdict:
    planned = plan.job.cluster.gpu.name
    if not facts.gpus:
        if planned == "cpu":
            return "ok", "planned for a CPU, as here"
        text = f"planned for {planned}, and there is no GPU here: it would run on the CPU"
        return "bad" if facts.gpu_problem else "warn", text, "run it where the GPUs are"
    name = facts.gpus[0].name
    kind = _known_gpu(name)
    if kind is None:
        return "warn", f"planned for {planned}, here are {name}: no peak is known of them", ""
    if kind.name == planned:
        return "ok", f"planned for {planned}, as here"
    text = f"planned for {planned}, here are {name}: times and memory will differ"
    return "warn", text, f"plan anew with --cluster {len(facts.gpus)}x{kind.name}"


def plan_precision(plan: Plan, facts: MachineFacts) -> Verdict:
    wanted = plan.job.precision
    if not facts.gpus:
        if wanted == "fp32":
            return "ok", "fp32"
        return "warn", f"{wanted} is planned, but on a CPU train computes in fp32", ""
    gpu = _known_gpu(facts.gpus[0].name)
    if gpu is None:
        return "ok", f"{wanted}"
    if wanted not in gpu.peak_tflops:
        known = ", ".join(gpu.peak_tflops)
        return "bad", f"{gpu.name} does not compute in {wanted}", f"job.precision= one of {known}"
    return "ok", f"{wanted}, which {gpu.name} computes in"


def plan_memory(plan: Plan, facts: MachineFacts) -> Verdict:
    """The predicted peak against free and total memory."""
    peak = plan.estimate.peak_gib * GIB
    if facts.gpus:
        least = min(facts.gpus, key=lambda gpu: gpu.free_bytes)
        whole, free, where = least.memory_bytes, least.free_bytes, f"GPU {least.index}"
    else:
        mine = _rank_info(facts)
        local = mine.local_world if mine else plan.layout.gpus
        peak *= local
        whole, free, where = facts.memory_bytes, facts.free_memory_bytes, f"this machine, for {local} processes,"
    text = f"a peak of {peak / GIB:,.1f} GiB is predicted, {where} has {whole / GIB:,.1f} GiB, {free / GIB:,.1f} GiB of it free"
    if peak > whole:
        return "bad", text, "ultrascale plan … --objective memory finds layouts that need less"
    if peak > free:
        return "bad", text, "end what holds the rest (nvidia-smi, top)"
    return "ok", text


def plan_checkpoints(plan: Plan, facts: MachineFacts) -> Verdict:
    """Those that are kept, and the one that is being written."""
    each = MASTER_BYTES + plan.job.state_bytes
    one, free, keep = plan.job.model.parameters * each, facts.disk.free_bytes, Checkpointing().keep
    text = f"one takes {one / GIB:,.2f} GiB ({each:g} bytes a parameter), {free / GIB:,.1f} GiB are free at {facts.disk.place}"
    if one > free:
        return "bad", text, "make room, or give train --out another disk"
    if (keep + 1) * one > free:
        return "warn", f"{text}: not enough for {keep} and one in the making", "try checkpoint.keep=1"
    return "ok", text


PLAN_CHECKS: dict[str, Callable[[Plan, MachineFacts], Verdict]] = {
    "plan: engine": plan_engine,
    "plan: estimate": plan_estimate,
    "plan: processes": plan_processes,
    "plan: device": plan_device,
    "plan: precision": plan_precision,
    "plan: memory": plan_memory,
    "plan: checkpoints": plan_checkpoints,
}
