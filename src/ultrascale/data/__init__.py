"""Tokens: files of them, how texts become them, in which order they are read. numpy, never torch."""
