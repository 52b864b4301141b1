"""Flavors of torchtitan 0.2's own models in the shapes of foreign.py: it imports this as `experimental.custom_import`."""

from __future__ import annotations

from shapes import FLAVORS, titan_arguments
from torchtitan.models import llama3, qwen3

for name, model in FLAVORS.items():
    known = llama3.llama3_args if model.moe is None else qwen3.qwen3_args
    known[name] = titan_arguments(model, 0, type(next(iter(known.values()))))  # it sets the length of sequences itself
