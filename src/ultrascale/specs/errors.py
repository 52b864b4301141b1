"""The errors a user meets: input that cannot be used (what was given, what is allowed, what works), and a run that ended."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SpecError(ValueError):
    """A model, cluster, job, layout, plan or flag that cannot be used as given.

    The message is one sentence for the person who has to fix it; the command line prints it and exits with code 2.
    """


class RunError(RuntimeError):
    """A run that cannot continue, explained in one sentence: no traceback would add to it. Exit code 1."""


def nearest(given: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """A hint that names the closest known words: `did you mean 'tp'?`; when nothing is close, `otherwise` or the whole list."""
    known = sorted(known)
    close = get_close_matches(given, known, n=2, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(f"'{word}'" for word in close) + "?"
    return otherwise or "known: " + ", ".join(known)


def divisors(number: int) -> list[int]:
    """All divisors, ascending; found by trial up to the root, since batches and worlds stay small."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def near(value: int, allowed: list[int]) -> str:
    """The allowed values on either side of a wrong one."""
    below = [a for a in allowed if a < value][-1:]
    above = [a for a in allowed if a > value][:1]
    return " or ".join(map(str, below + above)) or "1"


def os_reason(error: Exception) -> str:
    """The operating system's words for an error, to stand in brackets: `no space left on device`."""
    return (getattr(error, "strerror", None) or str(error)).lower()
