"""Whose memory is whose on this rank: the bytes of a step by owner, as the Estimate counts them.

On a CPU every storage is followed through one step; on a GPU the allocator tells the peak, states are counted, and what is
left is activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ultrascale.parallel.zero import FSDPGrads
from ultrascale.specs.measurement import MeasuredMemory
from ultrascale.train.engine import Engine
from ultrascale.train.live_memory import LiveBytes

OWNERS = ("parameters", "master", "gradients", "optimizer", "activations", "buffers")


T = TypeVar("T")


def account(engine: Engine, step: Callable[[], T], live: LiveBytes | None = None) -> tuple[MeasuredMemory, T]:
    """Runs `step`, one whole training step, and says what was alive at its peak, beside what the step returned.

    `live`: who follows it on a CPU, where somebody wants to see more of it.
    """
    return _followed(engine, step, live or LiveBytes()) if engine.mesh.device.type == "cpu" else _allocated(engine, step)


def states(engine: Engine) -> dict[str, list[torch.Tensor]]:
    """Tensors that outlive a step, by owner; what an offload put on the host is not the device's."""
    layout, device = engine.mesh.layout, engine.mesh.device
    # ZeRO-3's shards are the parameters, unless a gathered copy or another format computes.
    shards_compute = layout.zero == 3 and not layout.keep_gathered and engine.job.precision == "fp32"
    found: dict[str, list[torch.Tensor]] = {owner: [] for owner in OWNERS}
    for weight in engine.weights:
        sharded = isinstance(weight.parameter, DTensor)
        found["parameters" if not sharded or shards_compute else "master"].append(weight.local)
        if weight.master is not weight.local:
            found["master"].append(weight.master)
    found["optimizer"] = engine.optimizer.state_tensors()
    for chunk in engine.pipeline.chunks.values():
        found["gradients"] += chunk.gradients.held()
        if isinstance(chunk.gradients, FSDPGrads):
            kept = layout.zero < 3 or layout.keep_gathered
            found["parameters" if kept else "buffers"] += chunk.gradients.gathered()
    if layout.offload != "none":
        found["optimizer"], found["master"] = [], []
        if device.type == "cpu" and layout.offload == "parameters":
            found["parameters"] = []
    return found


def _followed(engine: Engine, step: Callable[[], T], live: LiveBytes) -> tuple[MeasuredMemory, T]:
    hooks = []
    with live:
        for owner, tensors in states(engine).items():
            live.track(tensors, owner)
        for chunk in engine.pipeline.chunks.values():
            if isinstance(chunk.gradients, FSDPGrads):
                # Whole gradients on their way into the scatter; ZeRO-1 keeps them from one micro-batch to the next, in the
                # format that meets.
                kept = "gradients" if engine.mesh.layout.zero == 1 and engine.mesh.layout.gas > 1 else "buffers"
                fresh = kept if not chunk.gradients.converts else "buffers"
                hooks += [_watch(parameter, partial(_made, live, fresh)) for parameter in chunk.gradients.unsharded()]
                if engine.mesh.layout.gas == 1:  # nothing was added up before: what a layer's scatter leaves is its gradients
                    hooks += [_watch(parameter, partial(_made, live, "gradients")) for parameter in chunk.gradients.shards()]
                _label_kept(chunk.gradients, live, kept)
        live.reset_peak()
        result = step()
    for hook in hooks:
        hook.remove()
    for chunk in engine.pipeline.chunks.values():
        vars(chunk.gradients).pop("after_backward", None)
    return MeasuredMemory(**{owner: live.peak_by_owner.get(owner, 0) for owner in OWNERS}), result


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _label_kept(gradients: FSDPGrads, live: LiveBytes, owner: str) -> None:
    """What one micro-batch left, shards or whole, are gradients to the next one; FSDP2 makes them out of sight of any hook."""
    after_backward = gradients.after_backward

    def after(last: bool, split: bool) -> None:
        after_backward(last, split)
        live.track(gradients.held(), "gradients")
        # No hook sees weight gradients that were put off, where they stay in the format in which they were made.
        put_off = [parameter.grad for parameter in gradients.unsharded() if split and parameter.grad is not None]
        live.track([*gradients.accumulated(), *put_off], owner)

    gradients.after_backward = after  # type: ignore[method-assign]


def _watch(parameter: torch.Tensor, seen: Callable[[torch.Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(seen)  # type: ignore[no-untyped-call]
    return handle


def _made(live: LiveBytes, owner: str, parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        live.track([parameter.grad], owner)


def _allocated(engine: Engine, step: Callable[[], T]) -> tuple[MeasuredMemory, T]:
    device, sizes = engine.mesh.device, dict.fromkeys(OWNERS, 0)
    torch.cuda.reset_peak_memory_stats(device)

    def look() -> None:
        sizes.update({owner: max(sizes[owner], size) for owner, size in _held(engine).items()})

    with _looking(engine, look):
        result = step()
    torch.cuda.synchronize(device)
    look()
    peak = torch.cuda.max_memory_allocated(device)
    reserved = torch.cuda.max_memory_reserved(device)
    rest = peak - sum(sizes.values())
    return MeasuredMemory(**{**sizes, "activations": max(0, rest), "runtime": reserved - peak}), result


def _held(engine: Engine) -> dict[str, int]:
    """Bytes now, by owner."""
    found = states(engine)
    if engine.mesh.layout.zero == 1:
        for chunk in engine.pipeline.chunks.values():
            found["gradients"] += chunk.gradients.accumulated() if isinstance(chunk.gradients, FSDPGrads) else []
    return {owner: _bytes(tensors, engine.mesh.device) for owner, tensors in found.items()}


@contextmanager
def _looking(engine: Engine, look: Callable[[], None]) -> Iterator[None]:
    """Looks before and after every backward: what ZeRO gathers and adds up is there then, and gone at the end of the step."""
    sharded = [chunk.gradients for chunk in engine.pipeline.chunks.values() if isinstance(chunk.gradients, FSDPGrads)]

    def beside(inner: Callable[..., None]) -> Callable[..., None]:
        def outer(*args: Any, **kwargs: Any) -> None:
            inner(*args, **kwargs)
            look()

        return outer

    for gradients in sharded:
        vars(gradients).update({name: beside(getattr(gradients, name)) for name in ("before_backward", "after_backward")})
    try:
        yield
    finally:
        for gradients in sharded:
            for name in ("before_backward", "after_backward"):
                vars(gradients).pop(name, None)


def _bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Each storage once."""
    storages = {tensor.untyped_storage()._cdata: tensor for tensor in map(_local, tensors) if tensor.device == device}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
