"""What a user asked to train: a plan or a model, overrides such as `layout.tp=4`, and what follows from them. No torch.

The batch belongs to the job and the number of processes to the machine. So dp follows from the processes, and accumulation
from the batch, unless both are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout, field_value
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan
from ultrascale.specs.training import Training, training_value
from ultrascale.specs.units import tokens
from ultrascale.specs.validate import build, shown
from ultrascale.train import supported

SECTIONS = ("layout", "train", "job")
JOB_FIELDS = ("seq", "batch_tokens", "precision", "gradients", "optimizer")
TRY_SEQ, TRY_SEQUENCES = 128, 16  # of a run without a plan: seconds on a laptop, divisible by most small layouts
TWO_STAGES = ("interleaved", "zb-v", "dualpipe-v")


@dataclass(frozen=True)
class Overrides:
    """`section.field=value` words, by section."""

    layout: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, words: Sequence[str]) -> Overrides:
        found: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for word in words:
            name, equals, text = word.partition("=")
            section, dot, key = name.strip().partition(".")
            if not equals or not dot:
                raise SpecError(
                    f"{shown(word)} is no override: write section.field=value, such as layout.tp=2 or train.lr=1e-3"
                )
            if section not in found:
                raise SpecError(f"{shown(word)} names no section of a run: {nearest(section, SECTIONS)}, such as layout.tp=2")
            found[section][key] = _PARSERS[section](key, text)
        return cls(**found)


def _job_value(key: str, text: str) -> Any:
    if key not in JOB_FIELDS:
        raise SpecError(f"job.{shown(key)[1:-1]} cannot be changed here: {nearest(key, JOB_FIELDS)}")
    if key in ("seq", "batch_tokens"):
        return tokens(text, f"job.{key}", "4096 or 4k")
    return text.strip().lower()


_PARSERS = {"layout": field_value, "train": training_value, "job": _job_value}


@dataclass(frozen=True)
class Request:
    """A run that has been checked: it can start."""

    job: Job
    layout: Layout
    training: Training
    notes: tuple[str, ...] = ()
    """what followed from what was given"""

    def on(self, cluster: Cluster) -> Request:
        """The same run on the machine that is there; on a CPU nothing is compiled."""
        engine = Framework.load("ultrascale-eager" if cluster.gpu.name == "cpu" else "ultrascale-gpu")
        return replace(self, job=self.job.changed(cluster=cluster, framework=engine))


def from_plan(plan: Plan, overrides: Overrides, world: int, training: Training | None = None, gpu: bool = True) -> Request:
    """A plan as it stands, or changed; dp is fitted to the processes that are there unless it is given."""
    job, notes = plan.job, []
    if not gpu and job.precision != "fp32" and "precision" not in overrides.job:
        notes.append(
            f"no GPU here: this computes in fp32, not in {job.precision} as planned (job.precision={job.precision} insists)"
        )
        job = job.changed(precision="fp32")
    return _request(job, plan.layout, overrides, world, training or Training(), notes)


def from_model(
    model: Model, overrides: Overrides, world: int, training: Training | None = None, precision: str = "fp32"
) -> Request:
    """A try without a plan: a short sequence and a small batch, the same for every layout."""
    seq = overrides.job.get("seq", TRY_SEQ)
    job = build(
        Job,
        {
            "model": model,
            "cluster": Cluster.load(f"{world}xh100"),  # stands in for the machine until that is known
            "seq": seq,
            "batch_tokens": seq * TRY_SEQUENCES,
            "precision": precision,
        },
        "job",
    )
    asked = overrides.layout
    if "batch_tokens" not in overrides.job and "gas" in asked:
        # Both given: they are the batch. The accumulation alone: the batch stays if a micro-batch can make it so.
        dp = _data_parallel(Layout().changed(**asked), asked, world)
        mbs = asked.get("mbs", 1)
        if "mbs" in asked or TRY_SEQUENCES % (dp * asked["gas"]):
            job = job.changed(batch_tokens=dp * mbs * asked["gas"] * seq)
    return _request(job, Layout(), overrides, world, training or Training(), [])


def _request(job: Job, base: Layout, overrides: Overrides, world: int, training: Training, notes: list[str]) -> Request:
    training = training.changed(**overrides.train)
    job = job.changed(**overrides.job)
    if job.cluster.gpus != world:
        job = job.changed(cluster=_resized(job.cluster, world))
    asked = overrides.layout
    layout = base.changed(**asked)
    follows: dict[str, Any] = {"dp": _data_parallel(layout, asked, world)}
    if layout.pp == 1 and "schedule" not in asked:
        follows |= {"schedule": "1f1b", "virtual_stages": 1}
    elif "virtual_stages" not in asked and "schedule" in asked:
        follows["virtual_stages"] = 2 if layout.schedule in TWO_STAGES else 1
    layout = layout.changed(**follows)
    layout = layout.changed(**_batch(job, layout, asked, base == Layout()))
    changed = {name: value for name, value in layout.model_dump().items() if value != getattr(base, name) and name not in asked}
    if changed and base != Layout():
        notes.append("to fit: " + ", ".join(f"layout.{name}={value}" for name, value in changed.items()))
    if layout.gpus != world:
        raise SpecError(_world_sentence(job, layout, training, world))
    supported.check(job, layout, training)
    return Request(job, layout, training, tuple(notes))


def _data_parallel(layout: Layout, asked: Mapping[str, Any], world: int) -> int:
    rest = layout.tp * layout.pp * layout.cp
    return layout.dp if "dp" in asked or world % rest else world // rest


def _batch(job: Job, layout: Layout, asked: Mapping[str, Any], base_is_a_try: bool) -> dict[str, int]:
    """Micro-batch and accumulation that make the job's batch; what was given stays."""
    sequences, dp = job.sequences, layout.dp
    if base_is_a_try and not {"gas", "mbs"} & set(asked) and layout.pp == 1 and sequences % dp == 0:
        return {"mbs": sequences // dp, "gas": 1}  # nothing asks for smaller pieces: a pipeline would
    if "gas" not in asked:
        return {"gas": sequences // (dp * layout.mbs)} if sequences % (dp * layout.mbs) == 0 else {}
    if "mbs" not in asked:
        return {"mbs": sequences // (dp * layout.gas)} if sequences % (dp * layout.gas) == 0 else {}
    return {}


def _resized(cluster: Cluster, world: int) -> Cluster:
    per_node = min(cluster.gpus_per_node, world)
    while world % per_node:
        per_node -= 1
    return cluster.model_copy(update={"nodes": world // per_node, "gpus_per_node": per_node})


def _world_sentence(job: Job, layout: Layout, training: Training, world: int) -> str:
    found = [str(one) for one in islice(supported.alternatives(job, layout, training), 2)]
    here = "one process" if world == 1 else f"{world} processes"
    ways = f"; with {here} these work: {'; '.join(found)}" if found else ""
    return (
        f"layout.dp·tp·pp·cp is {layout.dp}·{layout.tp}·{layout.pp}·{layout.cp} = {layout.gpus} but there "
        f"{'is' if world == 1 else 'are'} {here}: start {layout.gpus} with --nproc {layout.gpus} (or torchrun){ways}"
    )
