"""Starts runs on this machine: processes, rendezvous, heartbeat and watchdog, signals, restarts, exit reasons."""
