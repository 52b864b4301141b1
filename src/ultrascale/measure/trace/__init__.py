"""PyTorch's traces, ours and other engines', read and understood."""
