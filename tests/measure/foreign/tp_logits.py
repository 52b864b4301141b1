"""A head with tensor parallelism whose logits are gathered on every rank, run by tests in real processes and rehearsed."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
mesh = init_device_mesh(device, (2,), mesh_dim_names=("tp",))
model = nn.Linear(8, 1024, bias=False).to(device)
parallelize_module(model, mesh, ColwiseParallel(output_layouts=Replicate()))
optimizer = torch.optim.SGD(model.parameters(), foreach=False)
for _ in range(3):
    model(torch.zeros(64, 8, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
