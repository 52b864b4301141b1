"""Sample order: the window of a sample is a stateless function of the seed and the sample's number.

A single set is permuted differently in each epoch. A mixture first assigns its samples to the sets in a fixed pattern, so that
every range of steps contains each set's share; each set then has its own epochs and permutations.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np

EVALUATION = 0.02  # share of a set's windows, at its end, that is held out from training
LONGEST_PATTERN = 2**16  # samples; weights that need a longer pattern are rounded

_64_BITS = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


class SampleOrder:
    """The samples of one set: windows in a new order each epoch, its last ones held out for evaluation."""

    def __init__(self, windows: int, seed: int, held_out: float = EVALUATION) -> None:
        self.seed = seed
        self.evaluation_windows = max(1, int(windows * held_out))
        self.train_windows = windows - self.evaluation_windows

    def train(self, sample: int) -> int:
        epoch, place = divmod(sample, self.train_windows)
        return permuted(place, self.train_windows, splitmix64(splitmix64(self.seed) ^ epoch))

    def evaluation(self, sample: int) -> int:
        """Held-out windows in order, repeated from the first after the last."""
        return self.train_windows + sample % self.evaluation_windows


class MixturePattern:
    """Assigns samples to sets by weight, evenly: any range has each set's share to within a sample or two."""

    def __init__(self, weights: Sequence[Fraction]) -> None:
        shares = [weight / sum(weights) for weight in weights]
        self.length = min(lcm(*(share.denominator for share in shares)), LONGEST_PATTERN)
        self.counts = _counts(shares, self.length)
        # The pattern is divided into `count` equal intervals per set; the set's j-th sample is in the middle of the j-th.
        middles = np.concatenate([(np.arange(count) + 0.5) / count for count in self.counts])
        owners = np.repeat(np.arange(len(self.counts)), self.counts)
        ranks = np.concatenate([np.arange(count) for count in self.counts])
        places = np.lexsort((owners, middles))
        self._owners, self._ranks = owners[places], ranks[places]

    def locate(self, sample: int) -> tuple[int, int]:
        """The set that a sample comes from, and the sample's number within that set."""
        period, place = divmod(sample, self.length)
        owner = int(self._owners[place])
        return owner, period * self.counts[owner] + int(self._ranks[place])


def _counts(shares: Sequence[Fraction], length: int) -> list[int]:
    """The number of `length` samples of each set: exact if integral, else by largest remainder, and at least one."""
    counts = [max(1, int(share * length)) for share in shares]
    by_deficit = sorted(range(len(shares)), key=lambda one: counts[one] - shares[one] * length)
    for round_ in range(length - sum(counts)):
        counts[by_deficit[round_ % len(counts)]] += 1
    while sum(counts) > length:  # sets too small for one sample still got one: taken from the largest
        counts[counts.index(max(counts))] -= 1
    return counts


def seed_of(seed: int, place: int) -> int:
    """The seed of one set of a mixture, by its index."""
    return splitmix64(seed ^ splitmix64(place + 1))


def permuted(place: int, size: int, key: int) -> int:
    """The image of `place` under a keyed permutation of 0 … size − 1, without a table.

    A Feistel network permutes the next power of four; following its cycle until the value is below `size` restricts it to that
    range (cycle walking, Black and Rogaway 2002, section 3). That takes fewer than four steps on average.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for round_ in range(6):
            left, right = right, left ^ (splitmix64(key + round_ * _GOLDEN ^ right) & mask)
        place = left << half | right
        if place < size:
            return place


def splitmix64(word: int) -> int:
    """Hashes 64 bits to 64 well-mixed bits: the finalizer of SplitMix64 (Steele 2014)."""
    word &= _64_BITS
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _64_BITS
    return word ^ word >> 31
