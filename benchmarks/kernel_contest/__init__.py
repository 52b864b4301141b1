"""`ultrascale bench kernels`: the contest of our GPU kernels with those of others. A wheel has it in ultrascale/_benchmarks."""
