"""Rehearse programs that are not ours: one rank of a PyTorch script or of another engine, without GPU and without peers."""
