"""A run under the profiler: traces, ranges, memory over a step."""
