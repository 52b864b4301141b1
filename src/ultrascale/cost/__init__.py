"""The physics of a training step: parameters, FLOPs, memory, kernels, collectives, schedules. Pure functions, no torch."""
