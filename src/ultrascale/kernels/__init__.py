"""Fused kernels and formats of numbers, each with a plain twin that is its test and its fallback; applied from outside."""
