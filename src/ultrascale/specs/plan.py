"""Plan: a job, how it is cut, what is predicted, and why. `plan.yaml` is read and written here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError
from ultrascale.specs.estimate import Estimate, Flag, Number
from ultrascale.specs.files import read_mapping, rounded, to_yaml, write_text
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.validate import FrozenSpec, build, shown


class Neighbour(FrozenSpec):
    """A layout one step away from the selected one, and why it was not taken."""

    change: str
    """`tp=16`, with what had to follow: `tp=16 (dp=1)`"""
    layout: Layout
    step_time_s: Number
    peak_gib: Number
    fits: Flag
    verdict: str


class Plan(FrozenSpec):
    job: Job
    layout: Layout
    estimate: Estimate
    reasons: tuple[str, ...] = ()
    rejected: tuple[Neighbour, ...] = ()

    @model_validator(mode="after")
    def _estimate_is_of_the_layout(self) -> Self:
        stages, pp = len(self.estimate.memory), self.layout.pp
        if stages != pp:
            raise ValueError(
                f"plan.estimate.memory lists {stages} stages but layout.pp is {pp}: try pp: {stages}, or plan anew"
            )
        return self

    def save(self, path: str | Path) -> Path:
        """Write plan.yaml, whole or not at all."""
        target = Path(path)
        write_text(target, HEADER + to_yaml(self.to_mapping()))
        return target

    def to_mapping(self) -> dict[str, Any]:
        """Readable and complete: the cluster's numbers are in it, so that a plan means the same on another machine."""
        return {
            "job": job_to_mapping(self.job),
            "layout": self.layout.model_dump(mode="json"),
            "estimate": rounded(self.estimate.model_dump(mode="json")),
            "reasons": list(self.reasons),
            "rejected": [rounded(one.model_dump(mode="json")) for one in self.rejected],
        }

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        return cls.from_mapping(read_mapping(Path(path), "plan"))

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Plan:
        for part in ("job", "layout", "estimate"):
            if not isinstance(data.get(part), Mapping):
                given = f"is {shown(data[part])} but must be a mapping" if part in data else "is missing"
                raise SpecError(f"plan.{part} {given}: `ultrascale plan … -o plan.yaml` writes all of it")
        return build(
            cls,
            {
                **data,
                "job": job_from_mapping(data["job"], "plan.job"),
                "layout": build(Layout, data["layout"], "plan.layout"),
                "estimate": build(Estimate, data["estimate"], "plan.estimate"),
            },
            "plan",
        )


def job_to_mapping(job: Job) -> dict[str, Any]:
    data = job.model_dump(mode="json", exclude_none=True)
    data["model"] = job.model.model_dump(mode="json", exclude_defaults=True)
    data["cluster"] = job.cluster.to_mapping()
    same = Framework.presets().get(job.framework.name) == job.framework
    data["framework"] = job.framework.name if same else job.framework.model_dump(mode="json", exclude_defaults=True)
    return data


def job_from_mapping(data: Mapping[str, Any], what: str) -> Job:
    if not isinstance(data, Mapping):
        return build(Job, data, what)  # which says so
    job = dict(data)
    for name, preset in (("model", Model.load), ("cluster", Cluster.load), ("framework", Framework.load)):
        if isinstance(job.get(name), str):
            job[name] = preset(job[name])
    if isinstance(job.get("cluster"), Mapping):
        job["cluster"] = Cluster.from_mapping(job["cluster"])
    if isinstance(job.get("model"), Mapping):
        job["model"] = build(Model, job["model"], f"{what}.model")
    return build(Job, job, what)


HEADER = "# A plan of ultrascale: `ultrascale explain` reads it. Memory in bytes unless a name ends in gib, times in seconds.\n"
