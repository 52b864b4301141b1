"""One rank of a plan's world, run alone, beside the estimate."""
