"""Evidence: what was measured, beside what was predicted."""
