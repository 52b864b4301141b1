"""Where the GPU waits for the host: a step's launches go into a queue, which the host fills and the GPU empties.

A stretch of a step is so much host time, to launch it, and so much device time, to run it. The host goes on while the GPU
works: what it gains at long kernels (head and loss, long rows of attention) pays for short ones later. Nobody is ahead after a
synchronisation: our engine reads loss and gradient norm once a step, before the optimizer; routing reads counts back in every
layer; a pipeline's stages wait for each other.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from ultrascale.cost.columns import Array, Columns
from ultrascale.cost.hardware import Machine
from ultrascale.cost.memory import alone
from ultrascale.cost.passes import Passes
from ultrascale.cost.stages import RankShare
from ultrascale.specs.job import Job
from ultrascale.specs.model import Model

# Kernels of one compiled layer of our engine, as profiled on an H200: forward, backward (the gradient of a bias is two sums
# more), and forward once more, which stops before the last product. A fused layer has 9 and 22, each launched from Python with
# autograd around it: they take the host as long.
FORWARD, BACKWARD, AGAIN, OF_BIAS = 14, 29, 11, 2
# A kernel for one weight, launched in a loop with no autograd around it: its step, its norm, its sum of micro-batches.
OF_WEIGHT = 0.5
# Embedding, rotary tables, loss, and their backward.
OF_ENDS = 40


def queued(job: Job, columns: Columns, machine: Machine) -> bool:
    """Whether one queue runs through the whole step; else each layer waits for its own launches. Rows share their pp."""
    asynchronous = job.framework.counted and not machine.efficiency.synchronous
    return asynchronous and not job.model.moe_layers and bool((columns.pp == 1).all())


def _each_s(machine: Machine) -> float:
    return machine.launch_s * machine.framework.launch


def of_weights(model: Model, machine: Machine, layers: Array) -> Array:
    """Host time of one launch for every weight of so many layers: products, norms, biases; experts of a layer are stacked."""
    biases = 3 * model.qkv_bias + model.attention_output_bias + 2 * model.mlp_bias + 2 * model.qk_norm
    return np.asarray(OF_WEIGHT * _each_s(machine) * (4 + (3 if model.gated else 2) + 2 + biases) * layers)


def of_layer(job: Job, columns: Columns, machine: Machine) -> tuple[float, Array]:
    """Host time to launch one dense layer, forward and backward."""
    biases = 3 * job.model.qkv_bias + job.model.attention_output_bias + 2 * job.model.mlp_bias
    again = np.where(columns.is_("recompute", "full"), AGAIN, 0)
    each = _each_s(machine) * job.framework.kernels
    return each * FORWARD, np.asarray(each * (BACKWARD + OF_BIAS * biases + again))


def idle_s(
    job: Job,
    columns: Columns,
    machine: Machine,
    share: RankShare,
    layers: Passes,
    head: Passes,
    optimizer_s: Array,
    late_s: Array,
) -> Array:
    """Seconds that the GPU idles between two synchronisations: optimizer, reading, then micro-batches of layers and head.

    A kernel is launched before it runs: a step takes at least the host's time up to the end of any stretch and the device's
    from there on. The longest of these is the step, and what it takes beyond the device's own time is idle. `late_s` of the
    gradients' reduction go on while the host launches the rest of backward.
    """
    gas = columns.gas
    forward, backward = (each * share.layers for each in of_layer(job, columns, machine))
    ends = OF_ENDS * _each_s(machine)
    weights = of_weights(job.model, machine, share.layers)
    backward = backward + np.where(alone(job, columns), 0.0, weights)
    optimizer = weights - optimizer_s
    begun = optimizer + machine.efficiency.step_overhead_s
    first = 0.5 * ends + forward - layers.forward
    whole = ends + forward + backward - layers.total - head.total
    waits = (
        np.zeros(len(columns)),
        optimizer,
        begun,
        begun + first,
        begun + (gas - 1) * whole + first,
        begun + gas * whole + weights - late_s,
    )
    return np.asarray(reduce(np.maximum, waits))
