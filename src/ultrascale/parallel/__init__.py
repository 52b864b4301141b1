"""Parallelism techniques: one file per technique of the playbook, each applied to a plain model from outside."""
