"""`doctor plan.yaml`: what would stop this plan on this machine, and what would work instead."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from ultrascale.cost.estimate import estimate
from ultrascale.launch.machine import kind_of_gpu
from ultrascale.launch.rank_info import RankInfo
from ultrascale.measure.doctor.facts import MachineFacts
from ultrascale.measure.doctor.findings import Finding, launched
from ultrascale.specs.checkpointing import Checkpointing
from ultrascale.specs.errors import SpecError
from ultrascale.specs.gpu import GPU
from ultrascale.specs.job import OPTIMIZER_STATE_BYTES
from ultrascale.specs.plan import Plan
from ultrascale.specs.training import Training
from ultrascale.specs.units import GIB
from ultrascale.train import supported

MASTER_BYTES = 4  # of a parameter in fp32: what the optimizer steps, and what a checkpoint keeps
SAME = 1e-4  # relative; a plan is written with six digits


def plan_findings(plan: Plan, facts: MachineFacts) -> list[Finding]:
    return [check(plan, facts) for check in CHECKS]


def engine(plan: Plan, facts: MachineFacts) -> Finding:
    """Whether the engine runs it, wherever."""
    try:
        supported.check(plan.job, plan.layout, Training())
    except SpecError as error:
        return Finding("plan: engine", "bad", str(error), "change the plan as it says, or plan anew")
    return Finding("plan: engine", "ok", f"{plan.job.model.name}, {plan.layout}: the engine runs it")


def stale(plan: Plan, facts: MachineFacts) -> Finding:
    try:
        now = estimate(plan.job, plan.layout)
    except SpecError as error:
        return Finding("plan: estimate", "bad", f"nothing can be predicted for its layout: {error}", "plan anew")
    for what, unit, written, predicted in (
        ("a step of", "s", plan.estimate.step_time_s, now.step_time_s),
        ("a peak of", "GiB", plan.estimate.peak_gib, now.peak_gib),
    ):
        if abs(written - predicted) > SAME * predicted:
            text = f"the file says {what} {written:,.4g} {unit} but {predicted:,.4g} {unit} is predicted now"
            return Finding("plan: estimate", "warn", text, "it was edited or comes from another version: plan anew")
    return Finding("plan: estimate", "ok", f"{now.step_time_s:,.3g} s a step, {now.peak_gib:,.1f} GiB: as the file says")


def processes(plan: Plan, facts: MachineFacts) -> Finding:
    """As many as the layout has parts: those that a launcher started, or one for each GPU."""
    needed, nodes = plan.layout.gpus, plan.job.cluster.nodes
    mine = _seat(facts)
    if mine is None and not facts.gpus:
        text = f"{needed} processes on {facts.cores} cores"
        if needed > facts.cores:
            return Finding("plan: processes", "warn", f"{text}: they take turns", f"plan for {facts.cores}xhere")
        return Finding("plan: processes", "ok", text)
    here = mine.world if mine else len(facts.gpus)
    whose = "processes started" if mine else "GPUs here"
    if here == needed or (mine is None and here > needed):
        return Finding("plan: processes", "ok", f"{needed} needed, {here} {whose}")
    if mine is None and nodes > 1 and here == plan.job.cluster.gpus_per_node:
        start = f"torchrun --nnodes {nodes} --nproc-per-node {here} -m ultrascale train plan.yaml"
        return Finding("plan: processes", "ok", f"{here} GPUs, as each of the {nodes} hosts must have: {start}, on each")
    layout = plan.layout
    sum_ = f"layout.dp·tp·pp·cp is {layout.dp}·{layout.tp}·{layout.pp}·{layout.cp} = {needed} but there are {here} {whose}"
    return Finding("plan: processes", "bad", sum_, _instead(plan, here) or f"start {needed} processes")


def _instead(plan: Plan, here: int) -> str:
    cluster = plan.job.cluster.model_copy(update={"nodes": 1, "gpus_per_node": here})
    job = plan.job.changed(cluster=cluster)
    found = [str(one) for one in islice(supported.alternatives(job, plan.layout, Training()), 2)]
    return f"with {here} these work: {'; '.join(found)}" if found else ""


def _seat(facts: MachineFacts) -> RankInfo | None:
    try:
        return launched(facts.environment)
    except SpecError:  # told by the check of the launcher
        return None


def device(plan: Plan, facts: MachineFacts) -> Finding:
    planned = plan.job.cluster.gpu.name
    if not facts.gpus:
        if planned == "cpu":
            return Finding("plan: device", "ok", "planned for a CPU, as here")
        text = f"planned for {planned}, and there is no GPU here: it would run on the CPU"
        return Finding("plan: device", "bad" if facts.gpu_problem else "warn", text, "run it where the GPUs are")
    name = facts.gpus[0].name
    try:
        kind = kind_of_gpu(name)
    except SpecError:
        return Finding("plan: device", "warn", f"planned for {planned}, here are {name}: no peak is known of them", "")
    if kind == planned:
        return Finding("plan: device", "ok", f"planned for {planned}, as here")
    text = f"planned for {planned}, here are {name}: times and memory will differ"
    return Finding("plan: device", "warn", text, f"plan anew with --cluster {len(facts.gpus)}x{kind}")


def precision(plan: Plan, facts: MachineFacts) -> Finding:
    wanted = plan.job.precision
    if not facts.gpus:
        if wanted == "fp32":
            return Finding("plan: precision", "ok", "fp32")
        return Finding("plan: precision", "warn", f"{wanted} is planned, but on a CPU train computes in fp32", "")
    try:
        gpu = GPU.load(kind_of_gpu(facts.gpus[0].name))
    except SpecError:
        return Finding("plan: precision", "ok", f"{wanted}")
    if wanted not in gpu.peak_tflops:
        known = ", ".join(gpu.peak_tflops)
        return Finding("plan: precision", "bad", f"{gpu.name} does not compute in {wanted}", f"job.precision= one of {known}")
    return Finding("plan: precision", "ok", f"{wanted}, which {gpu.name} computes in")


def memory(plan: Plan, facts: MachineFacts) -> Finding:
    """The predicted peak against what is there, free and in all."""
    peak = plan.estimate.peak_gib * GIB
    if facts.gpus:
        least = min(facts.gpus, key=lambda gpu: gpu.free_bytes)
        whole, free, where = least.memory_bytes, least.free_bytes, f"GPU {least.index}"
    else:
        mine = _seat(facts)
        local = mine.local_world if mine else plan.layout.gpus
        peak *= local
        whole, free, where = facts.memory_bytes, facts.free_memory_bytes, f"this machine, for {local} processes,"
    text = f"a peak of {peak / GIB:,.1f} GiB is predicted, {where} has {whole / GIB:,.1f} GiB, {free / GIB:,.1f} GiB of it free"
    if peak > whole:
        advice = "ultrascale plan … --objective memory finds layouts that need less"
        return Finding("plan: memory", "bad", text, advice)
    if peak > free:
        return Finding("plan: memory", "bad", text, "end what holds the rest (nvidia-smi, top)")
    return Finding("plan: memory", "ok", text)


def checkpoints(plan: Plan, facts: MachineFacts) -> Finding:
    """The newest ones that stay, and the one that is being written."""
    each = MASTER_BYTES + OPTIMIZER_STATE_BYTES[plan.job.optimizer]
    one, free, keep = plan.job.model.parameters * each, facts.disk.free_bytes, Checkpointing().keep
    text = f"one takes {one / GIB:,.2f} GiB ({each:g} bytes a parameter), {free / GIB:,.1f} GiB are free at {facts.disk.place}"
    if one > free:
        return Finding("plan: checkpoints", "bad", text, "make room, or give train --out another disk")
    if (keep + 1) * one > free:
        return Finding(
            "plan: checkpoints", "warn", f"{text}: not enough for {keep} and one in the making", "try checkpoint.keep=1"
        )
    return Finding("plan: checkpoints", "ok", text)


CHECKS: tuple[Callable[[Plan, MachineFacts], Finding], ...] = (
    engine,
    stale,
    processes,
    device,
    precision,
    memory,
    checkpoints,
)
