"""Two compiled blocks with tensor and sequence parallelism that are recomputed in backward, as torchtitan has them."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

TOKENS, WIDTH, HEADS, RANKS = 32, 16, 4, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).view(1, TOKENS, -1, WIDTH // HEADS).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(WIDTH), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (RANKS,))
model = nn.Sequential(Block(), Block()).to("cuda", torch.bfloat16)
for index, block in enumerate(model):
    plan = {
        "norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(block, mesh, plan)
    model[index] = torch.compile(checkpoint_wrapper(block), fullgraph=True)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(2):
    x = torch.randn(1, TOKENS // RANKS, WIDTH, device="cuda", dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    out = model(x)
    saved = torch.cuda.memory_allocated() - before
    assert saved == 2 * x.nbytes, saved  # the first block's output, which is the second one's input, and the second's
    out.sum().backward()
    del out
    optimizer.step()
    optimizer.zero_grad()
