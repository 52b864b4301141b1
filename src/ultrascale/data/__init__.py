"""Training data: token files, tokenization, mixtures and sample order. numpy, never torch."""
