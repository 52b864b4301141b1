"""Fused kernels and low-precision formats, each with a plain implementation as test and fallback, applied from outside."""
