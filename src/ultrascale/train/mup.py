"""μP (Yang et al. 2022, table 3): learning rate and initial weights of a narrow model that stay right for a wide one.

With `train.mup_base_width`, matrices of layers begin with 1/√m of the usual standard deviation and train with 1/m of the
learning rate, where m is the model's hidden size over that width; head and routers, whose outputs do not widen, with 1/m of
both. Embeddings, convolutions, norms and biases are as ever. Attention's scale stays 1/√head_dim: wide models have more heads
rather than wider ones.
"""

from __future__ import annotations

import math

from ultrascale.parallel.mesh import Shard
from ultrascale.specs.job import Job
from ultrascale.specs.training import Training

_OUTPUTS = ("head.linear.weight", "mlp.router.weight", "mlp.shared_gate.weight")


def init_scale(shard: Shard, job: Job, training: Training) -> float:
    """What initial values are multiplied by."""
    scale = lr_scale(shard, job, training)
    return scale if shard.name.endswith(_OUTPUTS) else math.sqrt(scale)


def lr_scale(shard: Shard, job: Job, training: Training) -> float:
    """What the learning rate is multiplied by."""
    widens = (shard.is_hidden_matrix and ".conv." not in shard.name) or shard.name.endswith(_OUTPUTS)
    return training.mup_base_width / job.model.hidden if training.mup_base_width is not None and widens else 1.0
