"""Pipeline parallelism: the hop between stages, and the textbook's bubble beside the simulated one."""

from __future__ import annotations

from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.memory.states import compute_bytes
from ultrascale.cost.mesh import GroupPlacement
from ultrascale.cost.overlap import CollectiveTransfer, OverlapRatio, transfer
from ultrascale.specs.job import Job


def hop(job: Job, columns: LayoutColumns, mesh: GroupPlacement, machine: ClusterRates) -> CollectiveTransfer:
    """Activations of one micro-batch to the next stage, or their gradients back; cut along the sequence when tp is."""
    wide = compute_bytes(job) * columns.tokens(job.seq) * job.model.hidden / columns.sequence_cut
    return transfer(machine, "pipeline", "send_recv", wide, mesh.pipeline)


def textbook_bubble(pp: int, microbatches: int, virtual_stages: int = 1) -> float:
    """Playbook: idle over busy time, (p−1)/(v·m); AFAB and 1F1B share it with v = 1."""
    return (pp - 1) / (virtual_stages * microbatches)


def ratio(pp: int, hidden: int, layers: int, layer_parameters: float, peak_flops: float, bandwidth: float) -> OverlapRatio:
    """One hop of 2·s·mbs·h bytes against the stage's 2·parameters FLOPs per token."""
    return OverlapRatio(
        "pipeline",
        "PP·peak_flops / (32·h·num_layers·peak_bw)",
        pp * peak_flops / (32 * hidden * layers * bandwidth),
        "PP·h·peak_flops / (num_layers·layer_parameters·peak_bw)",
        pp * hidden * peak_flops / (layers * layer_parameters * bandwidth) if pp > 1 else 0.0,
        "the printed form counts one byte an element and 16h² parameters a layer, which holds for one shape only",
    )
