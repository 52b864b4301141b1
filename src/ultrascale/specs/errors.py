"""The one error a user meets: what was given, what is allowed, and a value that works."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SpecError(ValueError):
    """A model, cluster, job, layout, plan or flag that cannot be used as given.

    The message is one sentence for the person who has to fix it; the command line prints it and exits with code 2.
    """


def nearest(given: str, known: Iterable[str]) -> str:
    """A hint that names the closest known words: `did you mean 'tp'?`, or the whole list when nothing is close."""
    known = sorted(known)
    close = get_close_matches(given, known, n=2, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(f"'{word}'" for word in close) + "?"
    return "known: " + ", ".join(known)
