"""The recipe: fit, reach the batch, go fast. Every legal layout is asked, the rules explain the answer."""

from ultrascale.plan.candidates import OBJECTIVES, Objective
from ultrascale.plan.gpu_counts import GPUCount, compare_kinds, fewest_gpus
from ultrascale.plan.search import Result, plan

__all__ = ["OBJECTIVES", "GPUCount", "Objective", "Result", "compare_kinds", "fewest_gpus", "plan"]
