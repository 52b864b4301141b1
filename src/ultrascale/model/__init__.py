"""A plain PyTorch transformer: no collective, no process group, nothing of a layout in it."""
