"""A hook for any PyTorch program that saves the tensors of chosen steps, for `ultrascale verify --dump`.

    from ultrascale.measure.dump import Dump

    dump = Dump(model, "a", mesh=mesh)      # after the model has been parallelised
    with dump.step(1):
        loss = ...
        dump.loss(loss)
        loss.backward()

Each rank saves its own part: weights, module outputs and their gradients, parameter gradients, and the loss. Nothing is
gathered. Placements of DTensors are read from the tensors; those of plain tensors are given.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ultrascale.measure.dump_index import MICROBATCH, Coordinates, Entry, Index, Part, files_of, parse_placement
from ultrascale.measure.verify_recording import one_rounding
from ultrascale.parallel.torch_private import FakeTensor, in_backward
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import write_text

ACTIVATIONS = f"dp:0 {MICROBATCH}:0"
_REDUCTIONS = {"sum": "sum", "avg": "mean"}
# Wrappers of data parallelism, checkpointing and torch.compile add these to names.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?:\.|$)")


class Dump:
    """Hooks on a model that save what it computes in `with dump.step(n)`."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        folder: str | os.PathLike[str],
        *,
        mesh: DeviceMesh | Coordinates | None = None,
        activations: str = ACTIVATIONS,
        placements: Mapping[str, str] | None = None,
        loss: str = "mean",
        rank: int | None = None,
        world: int | None = None,
        max_bytes: int = 2**26,
        program: str = "",
        perturb: int | None = None,
    ) -> None:
        """
        `model`: the whole model, or the stages of this rank.
        `mesh`: a DeviceMesh with names, or this rank's coordinate and the size of each axis: `{"dp": (0, 2), "tp": (1, 4)}`.
        `activations`: how module outputs are cut where they are no DTensors, outermost axis first. Axes that the mesh lacks
        do not count. `dp:0 microbatch:0` means that a data rank's micro-batches follow each other in the batch.
        `placements`: the same for single modules or parameters, by patterns of their names: `{"*.wq.weight": "tp:0"}`.
        `loss`: what a rank calls backward on is the `mean` over its own tokens, or its part of a `sum` over all.
        `max_bytes`: of one tensor; of a larger one every 2nd, 4th, … entry of a dimension is kept.
        `perturb`: a seed; changes all outputs and gradients by one rounding, to measure bounds.
        """
        parallel = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if parallel else 0
        self.world = world if world is not None else dist.get_world_size() if parallel else self.rank + 1
        if mesh is None and self.world > 1:
            raise SpecError(
                f"Dump has no mesh but {self.world} ranks: give a DeviceMesh with names, or mesh={{'dp': (rank, {self.world})}}"
            )
        if loss not in ("mean", "sum"):
            raise SpecError(f"loss is {loss!r} but must be 'mean' or 'sum'")
        self.mesh = _coordinates(mesh)
        self.activations = parse_placement(activations, self.mesh, strict=activations != ACTIVATIONS)
        self.placements = {name: parse_placement(text, self.mesh) for name, text in (placements or {}).items()}
        self.reduce_loss = loss
        self.folder, self.max_bytes, self.program = Path(folder), max_bytes, program
        if any(self.folder.glob(f"step-*/rank-{self.rank:04d}.json")):
            raise SpecError(f"dump {folder} already has steps of rank {self.rank}: name a new folder, such as {folder}-2")
        self.models = [model] if isinstance(model, nn.Module) else list(model)
        self.random = None if perturb is None else torch.Generator().manual_seed(perturb)
        self._recording: _Recording | None = None
        for one in self.models:
            hooked = {""}
            for name, module in one.named_modules():
                if (plain := plain_name(name)) not in hooked:  # a wrapper and what it wraps have one output
                    hooked.add(plain)
                    module.register_forward_hook(partial(self._output, plain))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Records forward and backward of the block, and writes them when it ends. Leave the optimizer's step outside."""
        self._recording = recording = _Recording(self)
        for name, parameter in self._parameters():
            recording.add(f"weight/{name}", name, parameter)
        try:
            yield
            without = []
            for name, parameter in self._parameters():
                gradient = getattr(parameter, "main_grad", None) if parameter.grad is None else parameter.grad  # Megatron's
                if gradient is None:
                    without.append(name)
                else:
                    recording.add(f"gradient/{name}", name, self._moved(gradient))
        finally:
            self._recording = None
        self._write(number, recording, tuple(without))

    def loss(self, value: Tensor) -> None:
        """What backward is called on; once for each micro-batch, whose losses add up."""
        if self._recording is not None:
            self._recording.loss(value)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for model in self.models:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    yield plain_name(name), parameter

    def _output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> Any:
        recording = self._recording
        if recording is None or not torch.is_grad_enabled() or in_backward():
            return None  # outside a step, evaluation, or recomputation
        single = isinstance(output, Tensor)
        outputs = (output,) if single else output if isinstance(output, (tuple, list)) else ()
        kept = []
        for number, tensor in enumerate(outputs):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not _without_data(tensor):
                tensor = self._moved(tensor)
                self._record(recording, f"{name}.{number}" if number else name, name, tensor)
            kept.append(tensor)
        if self.random is None or not kept:
            return None
        return kept[0] if single else type(output)(kept)

    def _record(self, recording: _Recording, key: str, name: str, tensor: Tensor) -> None:
        call = recording.add(f"forward/{key}", name, tensor)
        if tensor.requires_grad:

            def backward(gradient: Tensor) -> Tensor | None:
                moved = self._moved(gradient)
                recording.add(f"backward/{key}", name, moved, call)
                return None if self.random is None else moved

            tensor.register_hook(backward)  # type: ignore[no-untyped-call]

    def _moved(self, tensor: Tensor) -> Tensor:
        if self.random is None:
            return tensor
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        change = one_rounding(local, float(torch.finfo(tensor.dtype).eps), self.random) - local
        if isinstance(tensor, DTensor):
            change = DTensor.from_local(
                change, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
        return tensor + change

    def parts_of(self, name: str, tensor: Tensor, parameter: bool, call: int) -> tuple[Part, ...]:
        """How a tensor is cut: what was given for its name or kind, then what a DTensor itself says."""
        given = next((parts for pattern, parts in self.placements.items() if fnmatchcase(name, pattern)), None)
        parts = given if given is not None else [] if parameter else self.activations
        zigzag = {(part.axis, part.dim) for part in parts if part.zigzag}
        own = _dtensor_parts(tensor) if isinstance(tensor, DTensor) else []
        own = [part.model_copy(update={"zigzag": (part.axis, part.dim) in zigzag}) for part in own]
        axes = set(tensor.device_mesh.mesh_dim_names or ()) if isinstance(tensor, DTensor) else set()
        outer = [part for part in parts if part.axis not in axes]
        if not parameter and all(part.axis != MICROBATCH for part in outer):
            outer = [*outer, *(part for part in self.activations if part.axis == MICROBATCH)]
        numbered = [
            part.model_copy(update={"index": call, "size": call + 1}) if part.axis == MICROBATCH else part for part in outer
        ]
        return (*numbered, *own)

    @property
    def batch_axes(self) -> list[Part]:
        """The axes whose ranks have other tokens: losses are reduced over them."""
        return [part for part in self.activations if part.axis != MICROBATCH and part.dim is not None]

    def _write(self, step: int, recording: _Recording, without: tuple[str, ...]) -> None:
        from safetensors.torch import save_file

        index_file, file = files_of(self.folder, step, self.rank)
        index_file.parent.mkdir(parents=True, exist_ok=True)
        hidden = file.with_name(f".{file.name}")
        recording.end()
        save_file(recording.tensors, hidden)
        os.replace(hidden, file)
        index = Index(
            program=self.program,
            torch=torch.__version__,
            step=step,
            rank=self.rank,
            world=self.world,
            mesh=self.mesh,
            bytes=file.stat().st_size,
            entries=tuple(recording.entries),
            without_gradient=without,
        )
        write_text(index_file, index.model_dump_json())  # last: tensors without an index are not read


class _Recording:
    """The tensors of one step."""

    def __init__(self, dump: Dump) -> None:
        self.dump = dump
        self.tensors: dict[str, Tensor] = {}
        self.entries: list[Entry] = []
        self.calls: dict[str, int] = {}
        self.losses: list[Tensor] = []
        cut = {"dim": None, "zigzag": False, "reduce": dump.reduce_loss}
        self.loss_parts = [part.model_copy(update=cut) for part in dump.batch_axes]

    def add(self, key: str, name: str, tensor: Tensor, call: int | None = None) -> int:
        """Keep a copy; returns how often this key was recorded before. `call`: of the forward that a gradient belongs to."""
        dump, section = self.dump, key.split("/")[0]
        if call is None:
            call = self.calls.get(key, 0)
            self.calls[key] = call + 1
        parts = dump.parts_of(name, tensor, section in ("weight", "gradient"), call)
        mean = section == "backward" and dump.reduce_loss == "mean"
        scale = 1.0
        for part in dump.batch_axes if mean else ():
            scale /= part.size
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        kept, stride = _sampled(local, {part.dim for part in parts}, dump.max_bytes)
        self._keep(key, kept.to("cpu", copy=True).contiguous(), parts, scale, stride)
        return call

    def loss(self, value: Tensor) -> None:
        if isinstance(value, DTensor):
            self.loss_parts = _dtensor_parts(value)
            value = value.to_local()
        self.losses.append(value.detach().double().cpu().reshape(()))

    def end(self) -> None:
        if self.losses:
            self._keep("loss", torch.stack(self.losses).sum(), tuple(self.loss_parts))

    def _keep(
        self, key: str, tensor: Tensor, parts: tuple[Part, ...], scale: float = 1.0, stride: tuple[int, int] | None = None
    ) -> None:
        number = str(len(self.entries))
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.tensors[number] = tensor
        self.entries.append(
            Entry(
                key=key,
                tensor=number,
                dtype=dtype,
                shape=tuple(tensor.shape),
                parts=parts,
                scale=scale,
                stride=stride,
                time=time.time(),
            )
        )


def plain_name(name: str) -> str:
    """A module's or parameter's name without those of wrappers; empty for the model itself."""
    return _WRAPPERS.sub("", name).rstrip(".")


def _coordinates(mesh: DeviceMesh | Coordinates | None) -> dict[str, tuple[int, int]]:
    if not isinstance(mesh, DeviceMesh):
        return {axis: (int(index), int(size)) for axis, (index, size) in (mesh or {}).items()}
    place, names = mesh.get_coordinate(), mesh.mesh_dim_names
    if names is None or place is None:
        raise SpecError("mesh has no names: give mesh_dim_names=('dp', 'tp') to init_device_mesh")
    return {name: (place[number], mesh.size(number)) for number, name in enumerate(names)}


def _dtensor_parts(tensor: DTensor) -> list[Part]:
    """Its sharded and partial axes, outermost first."""
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if place is None:
        return []
    names = mesh.mesh_dim_names or tuple(f"axis{number}" for number in range(mesh.ndim))
    outer: list[Part] = []
    inner: list[Part] = []
    for number, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        cut: dict[str, Any] = {}
        if placement.is_partial():
            operation = getattr(placement, "reduce_op", "sum")
            if operation not in _REDUCTIONS:
                raise SpecError(
                    f"a tensor is partial by {operation} over {names[number]} but only sum and avg can be put together"
                )
            cut["reduce"] = _REDUCTIONS[operation]
        else:
            cut["dim"] = getattr(placement, "dim", 0) % tensor.ndim
        part = Part(axis=names[number], index=place[number], size=mesh.size(number), **cut)
        # FSDP2 cuts what tensor parallelism has cut before, which the order of axes does not say: a strided shard.
        (inner if hasattr(placement, "split_factor") else outer).append(part)
    return [*outer, *inner]


def _sampled(tensor: Tensor, cut: set[int | None], max_bytes: int) -> tuple[Tensor, tuple[int, int] | None]:
    """Every 2nd, 4th, … entry of the longest dimension that no axis cuts, so that the tensor takes at most `max_bytes`."""
    whole = [dim for dim in range(tensor.ndim) if dim not in cut]
    if tensor.nbytes <= max_bytes or not whole:
        return tensor, None
    dim = max(whole, key=lambda one: tensor.shape[one])
    stride = 1
    while tensor.nbytes // stride > max_bytes and stride < tensor.shape[dim]:
        stride *= 2
    return tensor[(slice(None),) * dim + (slice(None, None, stride),)], (dim, stride)


def _without_data(tensor: Tensor) -> bool:
    """Pipelines infer shapes with such tensors."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)
