"""What a run's difference from its plan is likely due to, term by term, by what plan and run are."""

from __future__ import annotations

from ultrascale.cost import host
from ultrascale.cost.attention import BLOCK
from ultrascale.specs.estimate import Estimate
from ultrascale.specs.measurement import Measurement
from ultrascale.specs.plan import Plan

HEAD, SHORT_ROW = 128, 2048  # of the attention that the tables were read from; shorter rows fill a GPU less
SLOW_LAUNCH_S = 2e-5  # more than this for each kernel, and the host is what a GPU waits for

_EXCHANGES = {
    "tensor exchange": "the link between its ranks is another than the plan's",
    "context exchange": "the link between its ranks is another than the plan's",
    "expert exchange": "experts got uneven shares of the tokens, or the link is another than the plan's",
    "gradient reduction": "data ranks wait for the slowest of them, or less of it hides behind backward",
    "ZeRO exchange": "less of it hides behind a layer's work than planned",
    "waiting for stages": "stages differ in what they compute, and each wait is for the slowest",
    "reading data": "the data is read slower than a step computes",
}
_OWNERS = {
    "parameters": "weights are kept in another format than planned",
    "master": "weights are kept in another format than planned",
    "gradients": "gradients are kept in another format, or come and go with their layers",
    "optimizer": "its states are kept in another format than planned",
    "activations, buffers": "backward keeps other tensors than the law counts",
}


def likely(term: str, plan: Plan, planned: Estimate, measured: Measurement, slower: bool) -> str | None:
    """A cause in words; None where there is no telling. `slower`: the run takes or holds more than planned."""
    if term == "attention":
        return _attention(plan, slower)
    if term in ("computing", "step time"):
        return _computing(plan, planned, measured, slower)
    if term == "optimizer":
        return "its kernels wait for the host to launch them, one or more for each tensor" if slower else None
    return _EXCHANGES.get(term) or _OWNERS.get(term)


def _attention(plan: Plan, slower: bool) -> str | None:
    job, layout = plan.job, plan.layout
    heads, seq = job.model.heads // layout.tp, job.seq
    if not slower:
        return "the kernel chosen here is faster than the table's"
    blocks = layout.mbs * heads * -(-seq // BLOCK)
    processors = job.cluster.gpu.multiprocessors
    if processors and blocks < 4 * processors:
        return f"{layout.mbs} × {heads} heads of {seq} tokens are {blocks} blocks, few for {processors} multiprocessors"
    if job.model.head_dim != HEAD:
        return f"head size {job.model.head_dim}"
    return f"rows of {seq} tokens are short" if seq <= SHORT_ROW else "the kernel chosen here is slower than the table's"


def _computing(plan: Plan, planned: Estimate, measured: Measurement, slower: bool) -> str | None:
    job, layout = plan.job, plan.layout
    if job.cluster.efficiency.synchronous:
        return "the machine was busy otherwise, or its rates were measured while it was" if slower else None
    counts = host.constants()
    of_layer = counts.launch_queue.layer.both if job.framework.fused_blocks else 3 * counts.compiled_layer.kernels
    kernels = of_layer * job.framework.launch * job.model.layers / layout.pp * layout.gas
    each_s = (measured.step_time_s - planned.time.optimizer_s) / kernels
    if slower and measured.step_time_s > 1.3 * planned.step_time_s and each_s < 10 * SLOW_LAUNCH_S:
        return (
            f"the GPU waits for the host: {layout.mbs * job.seq:,} tokens are little work for some {kernels:,.0f} kernels, "
            f"and each took {1e6 * each_s:.0f} µs; a larger micro-batch would fill it"
        )
    return None if job.cluster.calibrated else "no run has told the plan this GPU's constants: `ultrascale calibrate` fits them"
