"""Memory of one GPU: what is allocated and freed during a step, as data, and one walker over it."""
