"""Activations and their gradients by module name, as one rank computes them, with their place in the whole tensor.

A hook on every module of `MODULES` keeps its outputs in forward and the gradients of those outputs in backward. A rank knows
which sequences of the batch, which positions and which features it holds, so that each of its tensors can be compared with
the same slice of one process's tensor: no shard has to be gathered for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ultrascale.model.moe import RoutingResult
from ultrascale.parallel import comm
from ultrascale.parallel.mesh import Mesh
from ultrascale.train.data import rows_of
from ultrascale.train.engine import Engine

# Modules whose outputs have the same meaning under every layout. Inside experts a tensor-parallel rank holds partial sums.
MODULES = re.compile(
    r"embed|head\.(norm|linear)|blocks\.\d+(\.(attention_norm|mlp_norm|mlp|attention|attention\.(qkv|q_norm|k_norm|core|out)"
    r"|mlp\.(inputs|down|router)))?"
)
SHARED_BY_QUERIES = re.compile(r".*\.(qkv\.[12]|k_norm)")
"""keys and values, which ranks with other query heads share where there are fewer kv heads than ranks: gradients add up"""


@dataclass(frozen=True)
class ModuleShard:
    """A rank's part of one module's output [batch, sequence, features, …], or of its gradient."""

    rows: tuple[int, ...]
    """sequences of the global batch"""
    positions: Tensor
    tensor: Tensor


@dataclass
class ModuleTrace:
    """The modules' outputs and gradients of one step, in the order in which they were computed."""

    forward: dict[str, list[ModuleShard]] = field(default_factory=dict)
    backward: dict[str, list[ModuleShard]] = field(default_factory=dict)


class Tracer:
    """Hooks on an engine's modules that fill a Trace until they are removed."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.mesh = engine, engine.mesh
        self.trace = ModuleTrace()
        self._hooks = [
            module.register_forward_hook(self._recorder(name))
            for chunk in engine.pipeline.chunks.values()
            for name, module in named_modules(chunk.gradients.module)
        ]

    def take(self) -> ModuleTrace:
        """What was recorded since the last call; gradients as those of the mean loss over the whole batch."""
        trace, self.trace = self.trace, ModuleTrace()
        ranks = self.mesh.data.size  # the loss of each is weighed by it, since their gradients are averaged
        trace.backward = {
            name: [self._complete(name, ModuleShard(part.rows, part.positions, part.tensor / ranks)) for part in parts]
            for name, parts in trace.backward.items()
        }
        return trace

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _recorder(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            microbatch = self.engine.pipeline.microbatch
            if microbatch is None or not torch.is_grad_enabled():
                return  # computed again in backward, or evaluated
            rows = tuple(rows_of(self.mesh.layout, self.mesh.place.dp, microbatch))
            for key, tensor in tensors_of(name, output):
                self._keep(self.trace.forward, key, rows, tensor)
                if tensor.requires_grad and not name.endswith("router"):
                    tensor.register_hook(partial(self._keep, self.trace.backward, key, rows))  # type: ignore[no-untyped-call]

        return record

    def _keep(self, where: dict[str, list[ModuleShard]], key: str, rows: tuple[int, ...], tensor: Tensor) -> None:
        where.setdefault(key, []).append(ModuleShard(rows, self._positions(tensor.shape[1]), tensor.detach().clone()))

    def _positions(self, length: int) -> Tensor:
        """This rank's part of the sequence, or with sequence parallelism its slice of that."""
        here = self.engine.here
        return here if length == len(here) else here.chunk(self.mesh.tp.size)[self.mesh.tp.rank]

    def _complete(self, key: str, part: ModuleShard) -> ModuleShard:
        if self.mesh.kv.size == 1 or not SHARED_BY_QUERIES.fullmatch(key):
            return part
        return ModuleShard(part.rows, part.positions, comm.all_reduce(part.tensor.contiguous(), self.mesh.kv))


def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Those that are traced, by their names in the whole model."""
    for name, one in module.named_modules():
        plain = name.removeprefix("module.")  # DistributedDataParallel's
        if MODULES.fullmatch(plain):
            yield plain, one


def tensors_of(name: str, output: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        yield name, output
    elif isinstance(output, RoutingResult):
        yield f"{name}.weights", output.weights
    else:
        for number, tensor in enumerate(output):
            yield f"{name}.{number}", tensor


def expected(part: ModuleShard, mesh: Mesh, whole: Tensor) -> Tensor:
    """The slice of one process's tensor that a rank's part stands for."""
    found = whole[list(part.rows)][:, part.positions]
    features, here = found.shape[2], part.tensor.shape[2]
    ranks_with_the_same = mesh.tp.size * here // features  # all of them where nothing is cut; kv heads may be shared by a few
    return found.narrow(2, mesh.tp.rank // ranks_with_the_same * here, here)
