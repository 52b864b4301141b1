"""Live bytes against counts by hand: layers, views, freed and resized storages, checkpoints, FSDP2."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ultrascale.launch.local import run
from ultrascale.train.memory import LiveBytes

KIB = 1024


def kib(count: int) -> Tensor:
    return torch.zeros(count, 256)


def test_a_storage_counts_once_until_its_last_view_is_freed() -> None:
    with LiveBytes() as live:
        whole = kib(4)
        views = [whole.view(-1), whole[1:], whole.t(), whole.detach()]
        assert live.current == 4 * KIB
        del whole
        assert live.current == 4 * KIB
        views.clear()
        assert (live.current, live.peak) == (0, 4 * KIB)


def test_views_and_in_place_changes_allocate_nothing() -> None:
    old = kib(4)
    with LiveBytes() as live:
        view = old[1:].view(-1)
        view.add_(1)
        assert live.current == 0
        tensor = torch.tensor([1.0, 2.0])
        assert live.current == tensor.untyped_storage().nbytes() == 8


def test_the_peak_is_split_by_owner() -> None:
    weight, state = kib(2), kib(1)
    live = LiveBytes()
    live.track([weight, weight.view(-1)], "parameters")
    live.track([state], "optimizer")
    with live:
        temporary = kib(8)
        del temporary
        gradients = kib(3)
        live.track([gradients], "gradients")
    assert live.peak == 11 * KIB
    assert live.peak_by_owner == {"parameters": 2 * KIB, "optimizer": KIB, "activations": 8 * KIB}
    assert live.by_owner == {"parameters": 2 * KIB, "optimizer": KIB, "gradients": 3 * KIB}
    live.reset_peak()
    assert (live.peak, live.peak_by_owner) == (6 * KIB, live.by_owner)


def test_resized_storages_count_with_their_current_size() -> None:
    with LiveBytes() as live:
        tensor = kib(4)
        live.track([tensor], "parameters")
        tensor.untyped_storage().resize_(0)
        assert live.by_owner == {}
        tensor.untyped_storage().resize_(4 * KIB)
        assert live.by_owner == {"parameters": 4 * KIB}
        tensor.resize_(8, 256)
        assert live.by_owner == {"parameters": 8 * KIB}
    assert live.peak == 8 * KIB
    assert "resize_" not in vars(torch.UntypedStorage)  # torch is left as it was


def test_an_older_storage_that_grows_counts() -> None:
    old = kib(1)
    with LiveBytes() as live:
        old.untyped_storage().resize_(0)
        old.untyped_storage().resize_(KIB)
    assert live.current == KIB


def test_two_linear_layers_by_hand() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    inputs = torch.ones(4, 8)
    live = LiveBytes()
    live.track(model.parameters(), "parameters")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: live.track([p.grad], "gradients"))
    with live:
        loss = model(inputs).sum()
        # The second layer's input is kept for its weight's gradient; its output is freed, as a sum needs no input again.
        assert live.by_owner == {"parameters": 2 * 256, "activations": 4 * 8 * 4 + 4}
        loss.backward()
        assert live.by_owner == {"parameters": 2 * 256, "gradients": 2 * 256, "activations": 4}


def chain(x: Tensor) -> Tensor:
    for _ in range(4):
        x = x.tanh()  # keeps its output
    return x


def test_a_checkpoint_keeps_only_the_output() -> None:
    inputs = kib(2).requires_grad_()
    with LiveBytes() as plain:
        kept = chain(inputs)
        assert plain.current == 8 * KIB
    with LiveBytes() as full:
        kept = checkpoint(chain, inputs, use_reentrant=False)
        assert full.current == 2 * KIB
        kept.sum().backward()
    assert inputs.grad is not None
    assert full.peak >= 8 * KIB  # everything was recomputed


def test_tensors_cached_by_selective_checkpoints_are_counted() -> None:
    weight = torch.zeros(256, 256, requires_grad=True)
    inputs = kib(2)

    def block(x: Tensor) -> Tensor:
        return (x @ weight).tanh().tanh()

    def save_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    with LiveBytes() as live:
        kept = checkpoint(
            block, inputs, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(save_matmuls)
        )
        assert live.current == 2 * 2 * KIB  # the matmul and the output; the first tanh is freed
        del kept
        assert live.current == 0


def sharded(rank: int, nproc: int, store: str) -> tuple[dict[str, int], int, dict[str, int]]:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    live = LiveBytes()
    live.track(model.parameters(), "parameters")
    before = live.by_owner
    with live:
        model(torch.ones(1, 64)).sum().backward()
        live.track([p.grad for p in model.parameters() if p.grad is not None], "gradients")
        after = live.by_owner
        peak = live.peak
    dist.barrier()
    dist.destroy_process_group()
    return before, peak, after


def test_fsdp_frees_what_it_gathered() -> None:
    layer = 64 * 64 * 4
    for before, peak, after in run(sharded, 2, timeout_s=60):
        assert before == {"parameters": layer}  # half of each of two layers
        assert peak >= 2 * layer  # at the least one whole layer beside the shards
        assert after["gradients"] == layer
        assert after.get("activations", 0) < KIB  # gathered weights and buffers are freed; the loss's scalars are live
