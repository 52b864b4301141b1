"""Run with torchtitan 0.2 on its path: its own ConfigManager reads the TOML files named, and answers in JSON, a line each."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

from torchtitan.config import ConfigManager

for file in sys.argv[1:]:
    config = ConfigManager().parse_args(["--job.config_file", file])
    found = config.parallelism
    print(
        json.dumps(
            {
                "version": version("torchtitan"),
                "dp": found.data_parallel_replicate_degree * found.data_parallel_shard_degree,
                "tp": found.tensor_parallel_degree,
                "pp": found.pipeline_parallel_degree,
                "cp": found.context_parallel_degree,
                "batch": config.training.global_batch_size,
                "seq": config.training.seq_len,
            }
        )
    )
