"""Programs that are not ours, with the hook of `measure.dump`: one process, and parallelised by hand or by torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Replicate, Shard

from ultrascale.launch import local
from ultrascale.measure.dump import Dump

WIDTH, INNER, VOCAB, BATCH, LENGTH, LAYERS = 16, 32, 32, 8, 12, 2
EXPERTS = 4
Fault = str


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make() -> tuple[Net, Tensor, Tensor]:
    """The model, tokens and targets that all programs share."""
    torch.manual_seed(0)
    model = Net()
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH))
    return model, tokens, tokens.roll(1, 1)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def one_process(
    folder: Path, perturb: int | None = None, step: int = 1, change: Callable[[Net], None] | None = None, **options: Any
) -> None:
    model, x, y = make()
    if change is not None:
        change(model)
    dump = Dump(model, folder, perturb=perturb, program="one process", **options)
    with dump.step(step):
        loss = loss_of(model, x, y)
        dump.loss(loss)
        loss.backward()


def ranks(program: Callable[..., None], world: int, folder: Path, fault: Fault = "") -> None:
    local.run(_rank, world, program, folder, fault, timeout_s=60)


def _rank(rank: int, world: int, store: str, program: Callable[..., None], folder: Path, fault: Fault) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    program(rank, world, folder, fault)
    dist.barrier()
    dist.destroy_process_group()


def step(dump: Dump, model: nn.Module, x: Tensor, y: Tensor, microbatches: int = 1) -> None:
    with dump.step(1):
        for number, (inputs, targets) in enumerate(zip(x.chunk(microbatches), y.chunk(microbatches), strict=True)):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(number == microbatches - 1)
            loss = loss_of(model, inputs, targets) / microbatches
            dump.loss(loss)
            loss.backward()


def ddp(rank: int, world: int, folder: Path, fault: Fault) -> None:
    model, x, y = make()
    wrapped = nn.parallel.DistributedDataParallel(model)
    if fault == "reduced twice":
        wrapped.register_comm_hook(None, _sum_of_buckets)
    dump = Dump(wrapped, folder, mesh={"dp": (rank, world)})
    x, y = x.chunk(world)[rank], y.chunk(world)[rank]
    if fault == "other rows":
        x, y = x.flip(0), y.flip(0)
    step(dump, wrapped, x, y)


def _sum_of_buckets(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations as text
    """A sum in the place of a mean."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


def fsdp(rank: int, world: int, folder: Path, fault: Fault) -> None:
    model, x, y = make()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    dump = Dump(model, folder, mesh=mesh)
    step(dump, model, x.chunk(world)[rank], y.chunk(world)[rank], microbatches=2)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class RowLinear(nn.Linear):
    reduced = True

    def forward(self, x: Tensor) -> Tensor:
        partial = F.linear(x, self.weight)
        return _Reduce.apply(partial) if self.reduced else partial


def tensor_by_hand(rank: int, world: int, folder: Path, fault: Fault) -> None:
    """Megatron's column and row parallel layers; every rank has the whole batch."""
    model, x, y = make()
    for number, layer in enumerate(model.layers):
        mlp = layer.mlp
        up, down = nn.Linear(WIDTH, INNER // world), RowLinear(INNER // world, WIDTH, bias=False)
        place = (rank + 1) % world if fault == "wrong shard of down" and number == 1 else rank
        with torch.no_grad():
            up.weight.copy_(mlp.up.weight.chunk(world)[rank])
            up.bias.copy_(mlp.up.bias.chunk(world)[rank])
            down.weight.copy_(mlp.down.weight.chunk(world, 1)[place])
        down.reduced = not (fault == "no all-reduce" and number == 1)
        mlp.up, mlp.down = up, down
        if fault != "no all-reduce in backward" or number != 0:
            mlp.register_forward_pre_hook(lambda module, inputs: (_Copy.apply(inputs[0]),))
    if fault == "one rank's norm":
        model.layers[0].norm.register_forward_hook(lambda module, inputs, output: output * (1 + 0.01 * rank))
    placements = {"*.up.weight": "tp:0", "*.up.bias": "tp:0", "*.down.weight": "tp:1", "*.up": "tp:2"}
    if fault == "no placements":
        placements = {}
    dump = Dump(model, folder, mesh={"tp": (rank, world)}, placements=placements)
    step(dump, model, x, y)


class Experts(nn.Module):
    """A router to one expert for each token; a rank has the first or the second half of the experts, or one process all."""

    def __init__(self, fault: Fault = "") -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        self.fault, self.ranks = fault, 1

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        best, expert = self.router(tokens).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        rows, counts = tokens[order], torch.bincount(expert, minlength=EXPERTS)
        received, sizes = counts, (None, None)
        if self.ranks > 1:
            received = all_to_all_single_autograd(counts, None, None, dist.group.WORLD)
            sizes = tuple(one.view(self.ranks, -1).sum(1).tolist() for one in (received, counts))
            rows = all_to_all_single_autograd(rows, *sizes, dist.group.WORLD)
        # Rows come by rank, and from each rank by expert.
        experts = torch.arange(len(self.weight)).repeat(self.ranks).repeat_interleave(received)
        if self.fault == "rows taken as sorted":
            experts = experts.sort().values
        rows = torch.einsum("nij,nj->ni", self.weight[experts], rows)
        if self.ranks > 1:
            rows = all_to_all_single_autograd(rows, *reversed(sizes), dist.group.WORLD)
        return (rows[order.argsort()] * best.unsqueeze(-1)).view_as(x)


def _with_experts(fault: Fault = "") -> tuple[Net, Tensor, Tensor]:
    model, x, y = make()
    for layer in model.layers:
        layer.mlp = Experts(fault)
    return model, x, y


def experts_in_one_process(folder: Path) -> None:
    model, x, y = _with_experts()
    dump = Dump(model, folder, program="one process")
    step(dump, model, x, y)


def experts_by_hand(rank: int, world: int, folder: Path, fault: Fault) -> None:
    """Every rank has its part of the batch, and of each layer's experts."""
    model, x, y = _with_experts(fault)
    for layer in model.layers:
        layer.mlp.weight = nn.Parameter(layer.mlp.weight.detach().chunk(world)[rank].clone())
        layer.mlp.ranks = world
    dump = Dump(model, folder, mesh={"dp": (rank, world)}, placements={"*.mlp.weight": "dp:0"})
    x, y = x.chunk(world)[rank], y.chunk(world)[rank]
    with dump.step(1):
        loss = loss_of(model, x, y)
        dump.loss(loss)
        loss.backward()
        for name, parameter in model.named_parameters():
            if not name.endswith("mlp.weight"):
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
            elif fault != "expert gradients summed":  # of the mean over each rank's tokens
                parameter.grad /= world


def fsdp_and_tensor(rank: int, world: int, folder: Path, fault: Fault) -> None:
    """DTensors of torch: sequence parallelism over tp, FSDP2 over dp."""
    model, x, y = make()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.layers:
        plan: dict[str, Any] = {
            "norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.up": ColwiseParallel(use_local_output=False),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(layer, mesh["tp"], plan)
    parallelize_module(
        model,
        mesh["tp"],
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    dump = Dump(model, folder, mesh=mesh)
    part = mesh.get_local_rank("dp")
    step(dump, model, x.chunk(world // 2)[part], y.chunk(world // 2)[part])
