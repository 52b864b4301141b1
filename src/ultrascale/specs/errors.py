"""The errors a user meets: input that cannot be used (what was given, what is allowed, what works), and a run that ended."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SpecError(ValueError):
    """A model, cluster, job, layout, plan or flag that cannot be used as given.

    The message is one sentence for the person who has to fix it; the command line prints it and exits with code 2.
    """


class RunError(RuntimeError):
    """A run that cannot go on, told in a sentence: no traceback would add to it. Exit code 1."""


def nearest(given: str, known: Iterable[str]) -> str:
    """A hint that names the closest known words: `did you mean 'tp'?`, or the whole list when nothing is close."""
    known = sorted(known)
    close = get_close_matches(given, known, n=2, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(f"'{word}'" for word in close) + "?"
    return "known: " + ", ".join(known)
