"""Training: builds and runs a plan, with data, metrics, checkpoints and fault handling."""
