"""What would stop a run on this machine, before it is tried."""
