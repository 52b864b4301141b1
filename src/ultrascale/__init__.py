"""Ultrascale: the Ultra-Scale Playbook as software. Plan a training run, run it, know what it should do and what it did.

from ultrascale import Cluster, Job, Model, Trainer, Training, plan

job = Job(model=Model.load("tiny"), cluster=Cluster.load("2xh100"), seq=128, batch_tokens=2048)
best = plan(job).plans[0]
training = Training(steps=20, data="stdlib")
trainer = Trainer(best, training)
run = trainer.run("runs/first")
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ultrascale.cost.estimate import estimate
    from ultrascale.launch.launcher import Run, Trainer
    from ultrascale.plan import Result, fewest_gpus, plan
    from ultrascale.specs.cluster import Cluster
    from ultrascale.specs.errors import RunError, SpecError
    from ultrascale.specs.estimate import Estimate
    from ultrascale.specs.gpu import GPU
    from ultrascale.specs.job import Job
    from ultrascale.specs.layout import Layout
    from ultrascale.specs.measurement import Measurement
    from ultrascale.specs.model import Model
    from ultrascale.specs.plan import Plan
    from ultrascale.specs.training import Training

__version__ = "0.1.0"

_HOME = {
    "Model": "ultrascale.specs.model",
    "GPU": "ultrascale.specs.gpu",
    "Cluster": "ultrascale.specs.cluster",
    "Job": "ultrascale.specs.job",
    "Layout": "ultrascale.specs.layout",
    "Estimate": "ultrascale.specs.estimate",
    "Plan": "ultrascale.specs.plan",
    "SpecError": "ultrascale.specs.errors",
    "RunError": "ultrascale.specs.errors",
    "Measurement": "ultrascale.specs.measurement",
    "Training": "ultrascale.specs.training",
    "Trainer": "ultrascale.launch.launcher",
    "Run": "ultrascale.launch.launcher",
    "estimate": "ultrascale.cost.estimate",
    "Result": "ultrascale.plan",
    "fewest_gpus": "ultrascale.plan.gpu_counts",
}

__all__ = [
    "GPU",
    "Cluster",
    "Estimate",
    "Job",
    "Layout",
    "Measurement",
    "Model",
    "Plan",
    "Result",
    "Run",
    "RunError",
    "SpecError",
    "Trainer",
    "Training",
    "__version__",
    "estimate",
    "fewest_gpus",
    "plan",
]


def __getattr__(name: str) -> Any:
    """Names are imported when first used, so that `ultrascale --help` does not wait for numpy and pydantic."""
    if name not in _HOME:
        raise AttributeError(f"module 'ultrascale' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


class _Package(ModuleType):
    """`plan` is a folder and a function. As an attribute it is the function; `from ultrascale.plan import …` the folder."""

    @property
    def plan(self) -> Any:
        return import_module("ultrascale.plan.search").plan

    @plan.setter
    def plan(self, _: ModuleType) -> None:
        """The import system announces the folder here once it is loaded."""


sys.modules[__name__].__class__ = _Package
