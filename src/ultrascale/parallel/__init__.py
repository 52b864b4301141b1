"""One file per technique of the playbook; each changes a plain model from outside."""
