"""Which window a sample is: a function of the seed and the sample's number, with nothing kept between two samples.

A single set is permuted anew in each epoch. A mixture deals its samples to the sets in a fixed pattern first, so that every
stretch of a run holds each set's share, and each set then has its own epochs and permutations.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np

EVALUATION = 0.02  # share of a set's windows, at its end, that never train
LONGEST_PATTERN = 2**16  # samples; weights that need a longer one are rounded to it

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
        return permuted(place, self.train_windows, mixed(mixed(self.seed) ^ epoch))

    def evaluation(self, sample: int) -> int:
        """Held-out windows in order, from the first again after the last."""
        return self.train_windows + sample % self.evaluation_windows


class MixturePattern:
    """Deals samples to sets by weight, evenly: any stretch holds each set's share to within a sample or two."""

    def __init__(self, weights: Sequence[Fraction]) -> None:
        shares = [weight / sum(weights) for weight in weights]
        self.length = min(lcm(*(share.denominator for share in shares)), LONGEST_PATTERN)
        self.counts = _counts(shares, self.length)
        # The j-th sample of a set stands in the middle of the j-th of as many equal pieces of the pattern.
        middles = np.concatenate([(np.arange(count) + 0.5) / count for count in self.counts])
        owners = np.repeat(np.arange(len(self.counts)), self.counts)
        ranks = np.concatenate([np.arange(count) for count in self.counts])
        places = np.lexsort((owners, middles))
        self._owners, self._ranks = owners[places], ranks[places]

    def deal(self, sample: int) -> tuple[int, int]:
        """The set that a sample comes from, and the sample's number within that set."""
        period, place = divmod(sample, self.length)
        owner = int(self._owners[place])
        return owner, period * self.counts[owner] + int(self._ranks[place])


def _counts(shares: Sequence[Fraction], length: int) -> list[int]:
    """How many of `length` samples each set gets: exact where that is whole, else the largest remainders, and none nothing."""
    counts = [max(1, int(share * length)) for share in shares]
    by_lack = sorted(range(len(shares)), key=lambda one: counts[one] - shares[one] * length)
    for turn in range(length - sum(counts)):
        counts[by_lack[turn % len(counts)]] += 1
    while sum(counts) > length:  # sets too small for one sample got one all the same: the largest pays
        counts[counts.index(max(counts))] -= 1
    return counts


def seed_of(seed: int, place: int) -> int:
    """The seed of one set of a mixture, by its place in it."""
    return mixed(seed ^ mixed(place + 1))


def permuted(place: int, size: int, key: int) -> int:
    """Where a keyed permutation of 0 … size − 1 puts `place`, with no table kept.

    A Feistel network permutes the next power of four; walking its cycle until it is back below `size` permutes the rest
    (Black and Rogaway 2002, section 3). The walk takes fewer than four steps on average.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(6):
            left, right = right, left ^ (mixed(key + turn * _GOLDEN ^ right) & mask)
        place = left << half | right
        if place < size:
            return place


def mixed(word: int) -> int:
    """64 bits in, 64 well-mixed bits out: the finaliser of SplitMix64 (Steele 2014)."""
    word &= _64_BITS
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _64_BITS
    return word ^ word >> 31
