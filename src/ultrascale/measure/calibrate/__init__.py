"""A cluster whose constants are those of runs that it made."""
