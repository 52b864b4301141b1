"""A plain DistributedDataParallel program, run by tests in real processes and rehearsed."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if gpu else "gloo")
device, local = ("cuda", int(os.environ["LOCAL_RANK"])) if gpu else ("cpu", None)
if gpu:
    torch.cuda.set_device(local)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.Linear(256, 512)).to(device)
model = DistributedDataParallel(model, device_ids=[local] if gpu else None)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach="foreach" in sys.argv)
for _ in range(4):
    x = torch.randn(32, 256, device=device)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
