"""torchtitan's debug model in small, not compiled."""

from torchtitan.models.llama3.config_registry import llama3_debugmodel


def plan():
    found = llama3_debugmodel()
    found.compile.enable = False
    found.training.disable_cuda_graphs = True
    found.training.seq_len, found.training.local_batch_size, found.training.steps = 128, 4, 3
    found.parallelism.pipeline_parallel_schedule = "1F1B"
    return found
