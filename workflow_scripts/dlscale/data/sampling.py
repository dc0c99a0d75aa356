"""Random choices of samples: seed, epoch and index alone determine a sample, for any loader, machine or resumed run.

Random numbers come from a counter-based generator, Philox 4x64 (Salmon et al. 2011), with a key made of seed, epoch and
stream. Each sample has its own block of four words.
"""

from __future__ import annotations

import functools

import numpy as np

WORDS = 4  # 64-bit words in a Philox block


def words(seed: int, epoch: int, stream: str, count: int, start: int = 0) -> np.ndarray:
    """Return the random words of samples [start, start + count), uint64 [count, 4]; streams are independent."""
    key = np.random.SeedSequence([seed, epoch, *stream.encode()]).generate_state(2, np.uint64)
    generator = np.random.Philox(key=key)
    # numpy's Philox increments its counter before each block, so block n (counted from 0) has counter n + 1.
    generator.advance(start)
    return np.asarray(generator.random_raw(count * WORDS), dtype=np.uint64).reshape(count, WORDS)


def below(words_n: np.ndarray, bound: int | np.ndarray) -> np.ndarray:
    """Map words [n] to integers in [0, bound), int64 [n]; the relative bias is below bound / 2^32."""
    high = words_n >> np.uint64(32)
    return ((high * np.asarray(bound, dtype=np.uint64)) >> np.uint64(32)).astype(np.int64)


def order(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return the order in which an epoch visits `count` items: a permutation, int64 [count]."""
    key = np.random.SeedSequence([seed, epoch, *b"order"]).generate_state(2, np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(count)


def visits(seed: int, epoch: int, count: int, wanted: int | None, training: bool) -> np.ndarray:
    """Return the numbers of the items that an epoch visits, int64: at most `wanted` of `count` items.

    Training visits random items in random order. Validation and test always visit the same items: evenly spaced, in
    ascending order.
    """
    return order(seed, epoch, count)[:wanted] if training else evenly(count, wanted)


def locate(counts: np.ndarray, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the file of each item, and the item's number in this file, int64 [n]; file i has `counts[i]` items."""
    ends = np.cumsum(counts)
    file = np.searchsorted(ends, items, side="right")
    return file, items - (ends - counts)[file]


def evenly(count: int, wanted: int | None) -> np.ndarray:
    """Return at most `wanted` of the indices 0 to `count` - 1, evenly spaced and beginning with 0, int64."""
    return np.arange(count) if wanted is None or wanted >= count else np.arange(wanted) * count // wanted


class Visits:
    """Order in which an epoch visits the rows of several files, by `visits`; each row is a sample.

    File i has `counts[i]` rows; an epoch has `size` samples.
    """

    def __init__(self, counts: list[int], wanted: int | None, seed: int, training: bool) -> None:
        self._counts, self._seed, self._training = np.array(counts), seed, training
        self.size = min(wanted or sum(counts), sum(counts))

    def order(self, epoch: int) -> np.ndarray:
        """Return each sample's row, counted over all files, int64 [size]."""
        return visits(self._seed, epoch, int(self._counts.sum()), self.size, self._training)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - the cache holds the rows of two epochs, because epochs overlap
    def rows(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return each sample's file and row, int64 [size] each."""
        return locate(self._counts, self.order(epoch))
