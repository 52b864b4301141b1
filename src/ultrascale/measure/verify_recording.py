"""What `verify` compares: every tensor of a step by a key, as one process computes it and as each rank of a layout does.

Keys are `STEP/SECTION/NAME` in the order of computation, so that the first key that differs is where a fault appears. Hooks
record outputs of modules and their gradients; a rank knows which sequences, positions and features it has, and compares with
the same slice of one process's tensor, so that no shard is gathered. Bounds are measured: one process runs again with every
module output and gradient changed by one rounding, and the effect bounds what another order of sums may change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ultrascale.model.moe import RoutingResult
from ultrascale.parallel import comm
from ultrascale.parallel.mesh import Mesh
from ultrascale.specs.training import Training
from ultrascale.train.build import COMPUTE
from ultrascale.train.data import rows_of
from ultrascale.train.engine import Engine

# Modules whose outputs mean the same under every layout. Inside experts, tensor-parallel ranks have partial sums.
MODULES = re.compile(
    r"embed|head\.(norm|linear)|blocks\.\d+(\.(attention_norm|mlp_norm|mlp|attention|attention\.(qkv|q_norm|k_norm|core|out)"
    r"|mlp\.(inputs|down|router)))?"
)
SHARED_BY_QUERIES = re.compile(r".*\.(qkv\.[12]|k_norm)")
"""keys and values, which several ranks share where there are fewer kv heads than ranks: their gradients add up"""


@dataclass(frozen=True)
class ModuleShard:
    """A rank's part of one module's output [batch, sequence, features, …], or of its gradient."""

    name: str
    rows: tuple[int, ...]
    """sequences of the global batch"""
    positions: Tensor
    tensor: Tensor


ModuleTrace = tuple[list[ModuleShard], list[ModuleShard]]
"""outputs and gradients of modules in one step, each in the order of computation"""


class Tracer:
    """Hooks on an engine's modules that record a ModuleTrace."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.mesh = engine, engine.mesh
        self.trace: ModuleTrace = [], []
        for chunk in engine.pipeline.chunks.values():
            for name, module in named_modules(chunk.gradients.module):
                module.register_forward_hook(partial(self._record, name))

    def take(self) -> ModuleTrace:
        """What was recorded since the last call; gradients are those of the mean loss over the whole batch."""
        (forward, backward), self.trace = self.trace, ([], [])
        return forward, [replace(part, tensor=self._complete(part)) for part in backward]

    def _record(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        microbatch = self.engine.pipeline.microbatch
        if microbatch is None or not torch.is_grad_enabled():
            return  # recomputation in backward, or evaluation
        rows = tuple(rows_of(self.mesh.layout, self.mesh.place.dp, microbatch))
        forward, backward = self.trace
        for key, tensor in tensors_of(name, output):
            self._keep(forward, key, rows, tensor)
            if tensor.requires_grad and not name.endswith("router"):
                tensor.register_hook(partial(self._keep, backward, key, rows))  # type: ignore[no-untyped-call]

    def _keep(self, where: list[ModuleShard], key: str, rows: tuple[int, ...], tensor: Tensor) -> None:
        cut = tensor.shape[0] // len(rows)  # train.seq_stages: into so many shorter sequences
        positions, whole = self._positions(tensor.shape[1], cut), torch.unflatten(tensor.detach(), 0, (-1, cut)).flatten(1, 2)
        where.append(ModuleShard(key, rows, positions, whole.clone()))

    def _positions(self, length: int, cut: int) -> Tensor:
        """This rank's parts of the sequences, or its sequence-parallel slices of these, in whole sequences."""
        seq = self.engine.job.seq // cut
        here = self.engine.here[seq]
        here = here if length == len(here) else here.chunk(self.mesh.tp.size)[self.mesh.tp.rank]
        return torch.cat([here + seq * part for part in range(cut)])

    def _complete(self, part: ModuleShard) -> Tensor:
        """A gradient averaged over data ranks, and summed over the ranks that share its keys and values."""
        mean = part.tensor / self.mesh.data.size
        if self.mesh.kv.size == 1 or not SHARED_BY_QUERIES.fullmatch(part.name):
            return mean
        return comm.all_reduce(mean.contiguous(), self.mesh.kv)


def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The traced modules, by their names in the whole model."""
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
    """The slice of one process's tensor that corresponds to a rank's part."""
    found = whole[list(part.rows)][:, part.positions]
    features, here = found.shape[2], part.tensor.shape[2]
    ranks_with_the_same = mesh.tp.size * here // features  # all if the tensor is not sharded; a few may share kv heads
    return found.narrow(2, mesh.tp.rank // ranks_with_the_same * here, here)


_ROUTER_BIAS = re.compile(r"\d+/weight/blocks\.(\d+)\.mlp\.router\.bias")
Recording = Mapping[str, Tensor]
PERTURBED_RUNS = 2
FACTOR = 8.0
"""bound over what one rounding per module changes (docs/verify.md has the measurements)"""


@dataclass(frozen=True)
class StepPlan:
    """One step to run: its settings, whether an evaluation follows, and what is compared."""

    number: int
    """counted from 0"""
    training: Training
    evaluate: bool = False
    gradients: bool = False
    trace: bool = False
    weights: bool = False
    """weights and optimizer states after the update"""


@dataclass(frozen=True)
class Item:
    """One value or tensor of a step on this rank."""

    key: str
    value: Tensor
    slice: Callable[[Tensor], Tensor] = lambda whole: whole
    """the part of one process's tensor that this value is compared with"""
    rows: tuple[int, ...] = ()
    """of a module's output: sequences of the batch"""


class StepRunner:
    """Runs steps of an engine and yields their items."""

    def __init__(self, engine: Engine, trace: bool = False, seed: int | None = None) -> None:
        """`seed`: of a perturbation by one rounding; None: no perturbation."""
        self.engine = engine
        self.perturb = None if seed is None else Perturbation(engine, seed)
        self.tracer = Tracer(engine) if trace else None  # after the perturbation, to record its effect

    def run(self, step: StepPlan) -> Iterator[Item]:
        engine, at = self.engine, step.number + 1
        engine.training = step.training
        loss = engine.backward(engine.read(step.number))
        if self.perturb is not None:
            self.perturb.gradients(engine)
        trace: ModuleTrace = self.tracer.take() if self.tracer is not None else ([], [])
        yield from items_of(engine, at, trace if step.trace else ([], []), step.gradients, loss)
        result = engine.update(step.number, loss)
        yield Item(f"{at}/grad_norm", torch.tensor(result.grad_norm, dtype=torch.float64))
        if result.loads is not None:
            yield Item(f"{at}/expert_tokens", result.loads.tokens.double().clone())
        if step.weights:
            yield from self._states(at)
        if step.evaluate:
            yield Item(f"{at}/eval_loss", torch.tensor(engine.evaluate(step.training.eval_batches), dtype=torch.float64))

    def _states(self, at: int) -> Iterator[Item]:
        optimizer = self.engine.optimizer
        for weight in self.engine.weights:
            name, piece = weight.shard.name, weight.shard.piece
            yield Item(f"{at}/weight/{name}", weight.exact().clone(), piece)
            for moment in optimizer.moments(weight) if optimizer.updates else ():
                yield Item(f"{at}/{moment}/{name}", optimizer.moment(weight, moment).clone(), piece)


def items_of(engine: Engine, at: int, trace: ModuleTrace, gradients: bool, loss: Tensor | None = None) -> Iterator[Item]:
    """The items of forward and backward, before the update."""
    forward, backward = trace
    yield from (_module_item(engine, f"{at}/forward", part) for part in forward)
    if loss is not None:
        for name, one in _losses(engine, loss.detach().double().cpu()).items():
            yield Item(f"{at}/{name}", one)
    yield from (_module_item(engine, f"{at}/backward", part) for part in backward)
    if gradients:
        for weight in reversed(engine.weights):
            yield Item(f"{at}/gradient/{weight.shard.name}", weight.gradient.clone(), weight.shard.piece)
        yield from _norms(engine, at)


def _losses(engine: Engine, loss: Tensor) -> dict[str, Tensor]:
    """By the names of a step's record."""
    training, names = engine.training, ["loss"]
    names += ["z_loss"] * (training.z_loss > 0) + ["mtp_loss"] * (engine.job.model.mtp_depth > 0)
    return {name: one / (training.mtp_weight if name == "mtp_loss" else 1) for name, one in zip(names, loss, strict=True)}


def _norms(engine: Engine, at: int) -> Iterator[Item]:
    """Each weight's share in the squared gradient norm, over the ranks whose squares the norm adds up."""
    weights, parts = reversed(engine.weights), engine.mesh.parts
    own = {weight.shard.name: float(weight.gradient.double().square().sum()) * weight.shard.is_primary for weight in weights}
    everyone = [own] * parts.size
    if parts.group is not None:
        dist.all_gather_object(everyone, own, parts.group)
    for name in dict.fromkeys(name for squares in everyone for name in squares):
        total = sum(squares.get(name, 0.0) for squares in everyone)
        yield Item(f"{at}/norm/{name}", torch.tensor(total, dtype=torch.float64))


def _module_item(engine: Engine, section: str, part: ModuleShard) -> Item:
    return Item(f"{section}/{part.name}", part.tensor, partial(expected, part, engine.mesh), part.rows)


def record(runner: StepRunner, steps: Sequence[StepPlan]) -> dict[str, Tensor]:
    """Whole tensors of one process, with the sequences of the batch in order."""
    parts: dict[str, list[Item]] = {}
    for step in steps:
        for item in runner.run(step):
            parts.setdefault(item.key, []).append(item)
    return {
        key: torch.cat([item.value for item in sorted(items, key=lambda item: item.rows)]) if items[0].rows else items[0].value
        for key, items in parts.items()
    }


class Perturbation:
    """Changes module outputs, their gradients and weight gradients by one rounding, up or down at random."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.random = torch.Generator(engine.mesh.device).manual_seed(seed)
        self.eps = rounding(engine.job.precision)
        # fp8 rounds only the operands of matmuls, and to the nearest: by half the spacing at most.
        matmul = float(torch.finfo(torch.float8_e4m3fn).eps) / 2 if engine.job.precision == "fp8" else self.eps
        for chunk in engine.pipeline.chunks.values():
            for name, module in named_modules(chunk.gradients.module):
                if not name.endswith("router"):
                    eps = matmul if name.endswith(("qkv", "out", "inputs", "down")) else self.eps
                    module.register_forward_hook(partial(self._hook, eps))

    def gradients(self, engine: Engine) -> None:
        for weight in engine.weights:
            weight.gradient.copy_(self._moved(self.eps, weight.gradient))

    def _hook(self, eps: float, module: nn.Module, inputs: Any, output: Any) -> Any:
        moved = tuple(self._perturb(eps, tensor) for _, tensor in tensors_of("", output))
        return moved[0] if isinstance(output, Tensor) else moved

    def _perturb(self, eps: float, tensor: Tensor) -> Tensor:
        moved = tensor + (self._moved(eps, tensor) - tensor).detach()
        if moved.requires_grad:
            moved.register_hook(partial(self._moved, eps))  # type: ignore[no-untyped-call]
        return moved

    def _moved(self, eps: float, tensor: Tensor) -> Tensor:
        return one_rounding(tensor, eps, self.random)


@torch.no_grad()
def one_rounding(tensor: Tensor, eps: float, random: torch.Generator) -> Tensor:
    """A tensor with every entry changed by `eps` of itself, up or down at random."""
    signs = torch.randint(0, 2, tensor.shape, generator=random, device=random.device).to(tensor.device) * 2 - 1
    return (tensor.float() * (1 + eps * signs.double()).float()).to(tensor.dtype)


def rounding(precision: str) -> float:
    """Relative spacing of the format between matmuls: around fp8, a CPU computes in fp32 and a GPU in bf16."""
    around = "bf16" if torch.cuda.is_available() else "fp32"
    return float(torch.finfo(COMPUTE[around if precision == "fp8" else precision]).eps)


class RelativeError(NamedTuple):
    """The difference of a tensor from another, relative to that."""

    largest: float
    """largest difference over the largest entry"""
    rms: float
    """root mean square of the differences, over that of the entries"""

    @classmethod
    def between(cls, value: Tensor, wanted: Tensor, size: RelativeError) -> RelativeError:
        """`size`: the largest entry and the root mean square of the whole tensor that `wanted` is a slice of."""
        if not wanted.numel():
            return cls(0.0, 0.0)
        difference = value.double() - wanted.double()
        finite = wanted.isfinite()
        if not bool((value.isfinite() == finite).all()):
            return cls(math.inf, math.inf)
        found = cls.size(difference[finite])
        return cls(*(error / whole if whole else math.inf if error else 0.0 for error, whole in zip(found, size, strict=True)))

    @classmethod
    def size(cls, tensor: Tensor) -> RelativeError:
        if not tensor.numel():
            return cls(0.0, 0.0)
        wide = tensor.double()
        return cls(float(wide.abs().max()), float(wide.square().mean().sqrt()))


@dataclass(frozen=True)
class Bounds:
    """The largest error of each key that rounding explains."""

    by_key: Mapping[str, RelativeError]
    sizes: Mapping[str, RelativeError]
    """the largest entry and the root mean square of each key's tensor"""

    @classmethod
    def measured(cls, reference: Recording, perturbed: Sequence[Recording], eps: float, bias_rate: float = 0.0) -> Bounds:
        """`bias_rate`: the step of a router's biases."""
        sizes = {key: RelativeError.size(value[value.isfinite()]) for key, value in reference.items()}
        bounds = {}
        for key, whole in reference.items():
            errors = [RelativeError.between(run[key], whole, sizes[key]) for run in perturbed]
            bounds[key] = RelativeError(*(FACTOR * (max(found) + eps) for found in zip(*errors, strict=True)))
        found = cls(bounds, sizes)
        for key, allowed in found._undecided_biases(reference, bias_rate):
            added = RelativeError.between(allowed, torch.zeros_like(allowed), sizes[key])
            bounds[key] = RelativeError(*(bound + more for bound, more in zip(bounds[key], added, strict=True)))
        return found

    def _undecided_biases(self, reference: Recording, rate: float) -> Iterator[tuple[str, Tensor]]:
        """Of each router's biases what rounding may decide: a bias moves by the sign of its expert's load against the mean,
        and a load that is no further from the mean than its own bound may fall on either side.
        """
        layers = {key: int(match[1]) for key in reference if (match := _ROUTER_BIAS.fullmatch(key))}
        loads = [(key, value) for key, value in reference.items() if key.endswith("/expert_tokens")]
        for key, layer in layers.items():
            allowed = torch.zeros(reference[key].shape, dtype=torch.float64)
            for step, tokens in loads:
                own = tokens[layer - min(layers.values())]
                tolerance = self.by_key[step].largest * self.sizes[step].largest
                undecided = ((own - own.mean()).abs() <= tolerance) & (tolerance >= 1)
                allowed += 2 * rate * undecided
            yield key, allowed

    def excess(self, key: str, value: Tensor, wanted: Tensor) -> tuple[float, float]:
        """The largest relative difference of an entry, and the larger of both errors over its bound."""
        error = RelativeError.between(value, wanted, self.sizes[key])
        return error.largest, max(found / bound for found, bound in zip(error, self.by_key[key], strict=True))
