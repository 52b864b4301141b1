"""Where the GPU waits for the host: a step's launches go into a queue, which the host fills and the GPU empties.

A stretch of a step is so much host time, to launch it, and so much device time, to run it. The host goes on while the GPU
works: what it gains at long kernels (head and loss, long rows of attention) pays for short ones later. Nobody is ahead after a
synchronisation: our engine reads loss and gradient norm once a step, before the optimizer; routing reads counts back in every
layer; a pipeline's stages wait for each other.

On one GPU our engine records a step and launches it as one, if launching took longer than the GPU was then waited for: what
is left is the time between two steps.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from ultrascale.cost.activations import lean
from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.memory import alone, on_one_gpu
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
# Kernels of a layer that stream: forward, backward, forward once more; fused, and compiled.
STREAMS_FUSED, STREAMS_COMPILED, STREAMS_AGAIN = (4, 11), (6, 12), 4
# Seconds that such a kernel takes beyond its bytes, for its start and its last wave: steps of AdamW 1.9 and 2.0 µs, norms of
# gradients 3.3 and 3.5, sums of micro-batches 3.2, in recorded steps of models of 135 and 360 million parameters on an H200.
START_S = 2.7e-6
# A launch with Python and autograd around it, on a host whose bare ones took 6.4 µs: what an engine sees that decides by it.
AROUND_S = 49e-6
# Between two recorded steps, from reading the loss to the next launch: 0.1 to 0.5 ms in five such models.
BETWEEN_S = 0.3e-3


def queued(job: Job, columns: LayoutColumns, machine: ClusterRates) -> bool:
    """Whether one queue runs through the whole step; else each layer waits for its own launches. Rows share their pp."""
    asynchronous = job.framework.counted and not machine.efficiency.synchronous
    return asynchronous and not job.model.moe_layers and bool((columns.pp == 1).all())


def _each_s(machine: ClusterRates) -> float:
    return machine.launch_s * machine.framework.launch


def of_weights(model: Model, machine: ClusterRates, layers: Array) -> Array:
    """Host time of one launch for every weight of so many layers: products, norms, biases; experts of a layer are stacked."""
    return np.asarray(OF_WEIGHT * _each_s(machine) * weights_of(model) * layers)


def weights_of(model: Model) -> int:
    """Parameters of a layer, a matrix or a vector each."""
    biases = 3 * model.qkv_bias + model.attention_output_bias + 2 * model.mlp_bias + 2 * model.qk_norm
    return 4 + (3 if model.gated else 2) + 2 + biases


def of_layer(job: Job, columns: LayoutColumns, machine: ClusterRates) -> tuple[float, Array]:
    """Host time to launch one dense layer, forward and backward."""
    biases = 3 * job.model.qkv_bias + job.model.attention_output_bias + 2 * job.model.mlp_bias
    again = np.where(columns.is_("recompute", "full"), AGAIN, 0)
    each = _each_s(machine) * job.framework.kernels
    return each * FORWARD, np.asarray(each * (BACKWARD + OF_BIAS * biases + again))


def idle_s(
    job: Job,
    columns: LayoutColumns,
    machine: ClusterRates,
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
    overhead = machine.efficiency.step_overhead_s
    forward, backward = (each * share.layers for each in of_layer(job, columns, machine))
    ends = OF_ENDS * _each_s(machine)
    weights = of_weights(job.model, machine, share.layers)
    backward = backward + np.where(alone(job, columns), 0.0, weights)
    optimizer = weights - optimizer_s
    begun = optimizer + overhead
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
    one_by_one = np.asarray(reduce(np.maximum, waits))
    each = _each_s(machine)
    host = (ends + forward + backward) * (max(1.0, AROUND_S / each) if each else 1.0)
    recorded = recordable(job, columns) & (layers.total + head.total < 2 * host)
    return np.where(recorded, np.minimum(one_by_one, BETWEEN_S), one_by_one)


def starts_s(job: Job, columns: LayoutColumns, share: RankShare) -> tuple[Array, Array, Array]:
    """What kernels that stream take beyond their bytes: in forward and backward of a micro-batch, and in the optimizer."""
    full = columns.is_("recompute", "full")
    forward, backward = (
        np.where(lean(job, columns) & ~full, *counts) for counts in zip(STREAMS_FUSED, STREAMS_COMPILED, strict=True)
    )
    backward = backward + np.where(full, STREAMS_AGAIN, 0)
    weights = weights_of(job.model) * share.layers
    sums = np.where(alone(job, columns), 0, weights)
    return START_S * forward * share.layers, START_S * (backward * share.layers + sums), START_S * 2 * weights


def recordable(job: Job, columns: LayoutColumns) -> Array:
    """Where our engine can record a step's launches and make them as one (kernels/cuda_graphs.py says why not elsewhere)."""
    return on_one_gpu(job, columns) & (job.framework.recorded and job.precision != "fp16")
