"""What this machine does, measured: its hardware, collectives, kernels, layouts, and what each technique buys on it."""
