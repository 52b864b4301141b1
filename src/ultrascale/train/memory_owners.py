"""Measures the memory of a step on this rank by owner (parameters, gradients, …), with the Estimate's definitions.

On a CPU every storage is tracked through one step; on a GPU the allocator reports the peak, states are counted, and the rest
is activations.
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
from ultrascale.specs.estimate import MEASURED_OWNERS
from ultrascale.specs.measurement import MeasuredMemory
from ultrascale.train.engine import Engine
from ultrascale.train.live_memory import LiveBytes

T = TypeVar("T")


def account(engine: Engine, step: Callable[[], T], live: LiveBytes | None = None) -> tuple[MeasuredMemory, T]:
    """Runs `step`, one whole training step, and returns the memory by owner at its peak, and the result of the step.

    `live`: the tracker to use on a CPU, for a caller that needs more of its results.
    """
    return _by_storages(engine, step, live or LiveBytes()) if engine.mesh.device.type == "cpu" else _by_allocator(engine, step)


def states(engine: Engine) -> dict[str, list[torch.Tensor]]:
    """Tensors that outlive a step, by owner, without those offloaded to the host."""
    layout, device = engine.mesh.layout, engine.mesh.device
    # ZeRO-3's shards are the parameters, unless a gathered copy or another dtype is used in forward.
    shards_compute = layout.zero == 3 and not layout.keep_gathered and engine.job.precision == "fp32"
    found: dict[str, list[torch.Tensor]] = {owner: [] for owner in MEASURED_OWNERS}
    for weight in engine.weights:
        sharded = isinstance(weight.parameter, DTensor)
        found["parameters" if not sharded or shards_compute else "master"].append(weight.local)
        if weight.master is not weight.local:
            found["master"].append(weight.master)
    found["optimizer"] = engine.optimizer.state_tensors()
    for chunk in engine.pipeline.chunks.values():
        found["gradients"] += chunk.gradients.held()
        if isinstance(chunk.gradients, FSDPGrads):
            stays_gathered = layout.zero < 3 or layout.keep_gathered
            found["parameters" if stays_gathered else "buffers"] += chunk.gradients.gathered()
    if layout.offload != "none":
        found["optimizer"], found["master"] = [], []
        if device.type == "cpu" and layout.offload == "parameters":
            found["parameters"] = []
    return found


def _by_storages(engine: Engine, step: Callable[[], T], live: LiveBytes) -> tuple[MeasuredMemory, T]:
    hooks = []
    with live:
        for owner, tensors in states(engine).items():
            live.track(tensors, owner)
        for chunk in engine.pipeline.chunks.values():
            if isinstance(chunk.gradients, FSDPGrads):
                # Unsharded gradients before the reduce-scatter; ZeRO-1 accumulates them over micro-batches, in the reduce
                # dtype.
                unsharded = "gradients" if engine.mesh.layout.zero == 1 and engine.mesh.layout.gas > 1 else "buffers"
                new = unsharded if not chunk.gradients.converts else "buffers"
                hooks += [_hook(parameter, partial(_track, live, new)) for parameter in chunk.gradients.unsharded()]
                if engine.mesh.layout.gas == 1:  # nothing was accumulated before: the reduce-scatter's output is the gradient
                    hooks += [_hook(parameter, partial(_track, live, "gradients")) for parameter in chunk.gradients.shards()]
                _label_accumulated(chunk.gradients, live, unsharded)
        live.reset_peak()
        result = step()
    for hook in hooks:
        hook.remove()
    for chunk in engine.pipeline.chunks.values():
        vars(chunk.gradients).pop("after_backward", None)
    return MeasuredMemory(**{owner: live.peak_by_owner.get(owner, 0) for owner in MEASURED_OWNERS}), result


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _label_accumulated(gradients: FSDPGrads, live: LiveBytes, owner: str) -> None:
    """Labels accumulated gradients, sharded or not, after each micro-batch: FSDP2 computes them without calling hooks."""
    after_backward = gradients.after_backward

    def after(last: bool, split: bool) -> None:
        after_backward(last, split)
        live.track(gradients.held(), "gradients")
        # Hooks do not fire for deferred weight gradients, which stay in the dtype of backward.
        deferred = [parameter.grad for parameter in gradients.unsharded() if split and parameter.grad is not None]
        live.track([*gradients.accumulated(), *deferred], owner)

    gradients.after_backward = after  # type: ignore[method-assign]


def _hook(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def _track(live: LiveBytes, owner: str, parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        live.track([parameter.grad], owner)


def _by_allocator(engine: Engine, step: Callable[[], T]) -> tuple[MeasuredMemory, T]:
    device, sizes = engine.mesh.device, dict.fromkeys(MEASURED_OWNERS, 0)
    torch.cuda.reset_peak_memory_stats(device)

    def sample() -> None:
        sizes.update({owner: max(sizes[owner], size) for owner, size in _current(engine).items()})

    with _sampling(engine, sample):
        result = step()
    torch.cuda.synchronize(device)
    sample()
    peak = torch.cuda.max_memory_allocated(device)
    reserved = torch.cuda.max_memory_reserved(device)
    rest = peak - sum(sizes.values())
    return MeasuredMemory(**{**sizes, "activations": max(0, rest), "runtime": reserved - peak}), result


def _current(engine: Engine) -> dict[str, int]:
    """Current bytes by owner."""
    found = states(engine)
    if engine.mesh.layout.zero == 1:
        for chunk in engine.pipeline.chunks.values():
            found["gradients"] += chunk.gradients.accumulated() if isinstance(chunk.gradients, FSDPGrads) else []
    return {owner: _bytes(tensors, engine.mesh.device) for owner, tensors in found.items()}


@contextmanager
def _sampling(engine: Engine, sample: Callable[[], None]) -> Iterator[None]:
    """Samples before and after every backward: ZeRO's gathered and accumulated tensors exist then, not after the step."""
    sharded = [chunk.gradients for chunk in engine.pipeline.chunks.values() if isinstance(chunk.gradients, FSDPGrads)]

    def then_sample(inner: Callable[..., None]) -> Callable[..., None]:
        def outer(*args: Any, **kwargs: Any) -> None:
            inner(*args, **kwargs)
            sample()

        return outer

    for gradients in sharded:
        vars(gradients).update({name: then_sample(getattr(gradients, name)) for name in ("before_backward", "after_backward")})
    try:
        yield
    finally:
        for gradients in sharded:
            for name in ("before_backward", "after_backward"):
                vars(gradients).pop(name, None)


def _bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Total bytes, each storage counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor for tensor in map(_local, tensors) if tensor.device == device}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
