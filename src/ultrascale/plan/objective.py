"""What "best" means: the fastest step, the least GPU time a token, or the least memory."""

from typing import Literal, get_args

Objective = Literal["throughput", "cost", "memory"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)
