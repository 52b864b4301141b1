"""The recipe: fit, reach the batch, go fast. Every legal layout is asked, the rules explain the answer."""

from ultrascale.plan.search import OBJECTIVES, Objective, Result, plan

__all__ = ["OBJECTIVES", "Objective", "Result", "plan"]
