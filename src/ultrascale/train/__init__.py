"""Runs a plan: build, step, optimizer, precision, data, metrics."""
