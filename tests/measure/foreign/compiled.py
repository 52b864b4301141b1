"""Two compiled blocks of a norm, two linears, a gate and a third linear; writes what they save for backward, in bytes."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

TOKENS, WIDTH, INNER = 32, 8, 24
where, backend, rehearsed = sys.argv[1:4]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


dist.init_process_group("gloo")
model = nn.Sequential(Block(), Block())
if backend != "none":
    for index, block in enumerate(model):
        model[index] = torch.compile(block, fullgraph=True, backend=backend)
optimizer = torch.optim.SGD(model.parameters())
kept: dict[int, Tensor] = {}


def keep(tensor: Tensor) -> Tensor:
    kept[tensor.untyped_storage()._cdata] = tensor
    return tensor


states = {one.untyped_storage()._cdata for one in model.parameters()}
for _ in range(3):
    kept.clear()
    x = torch.randn(TOKENS, WIDTH)
    before = torch.cuda.memory_allocated() if rehearsed == "yes" else 0
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(x)
    if rehearsed == "yes":
        saved = torch.cuda.memory_allocated() - before - out.nbytes
    else:
        saved = sum(one.untyped_storage().nbytes() for key, one in kept.items() if key not in states) - x.nbytes
    Path(where).write_text(str(saved))
    kept.clear()
    out.sum().backward()
    del out
    optimizer.step()
    optimizer.zero_grad()
