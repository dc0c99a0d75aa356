"""Random crops of images, by torchvision's rules: where they lie, in pixels, and whether they are mirrored.

Shape suffixes: N images.
"""

from __future__ import annotations

import numpy as np

from dlscale.data import sampling

#: Tries to find a crop of a random shape that fits; then the middle of the image is taken.
TRIES = 10


def random_crops(
    seed: int,
    epoch: int,
    first: int,
    edges_N2: np.ndarray,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> np.ndarray:
    """Return top, left, height and width of the crops of samples `first` and on, int64 [N, 4].

    It is torchvision's `RandomResizedCrop.get_params`: an area, uniform in `scale` of the image's, and a shape, whose
    logarithm is uniform, are drawn until the crop fits, at most ten times; then its place. If none fits it is the
    middle of the image, as much of it as `ratio` allows.

    Parameters
    ----------
    edges_N2
        Height and width of the images, int64.
    """
    count = len(edges_N2)
    height_N, width_N = edges_N2.T
    crops_N4 = np.zeros((count, 4), np.int64)
    missing_N = np.ones(count, bool)
    logs = np.log(ratio)
    for number in range(TRIES):
        if number % 2 == 0:  # a sample has four words a stream: two tries
            words = sampling.words(seed, epoch, f"shape{number // 2}", count, first)
        area, log = (_uniform(words[:, 2 * (number % 2) + which]) for which in (0, 1))
        area = height_N * width_N * (scale[0] + (scale[1] - scale[0]) * area)
        shape = np.exp(logs[0] + (logs[1] - logs[0]) * log)
        width, height = (np.rint(np.sqrt(each)).astype(np.int64) for each in (area * shape, area / shape))
        fits = missing_N & (width > 0) & (width <= width_N) & (height > 0) & (height <= height_N)
        crops_N4[fits, 2], crops_N4[fits, 3] = height[fits], width[fits]
        missing_N &= ~fits
        if not missing_N.any():
            break
    place = sampling.words(seed, epoch, "place", count, first)
    for axis, edge_N in enumerate((height_N, width_N)):
        crops_N4[:, axis] = sampling.below(place[:, axis], edge_N - crops_N4[:, 2 + axis] + 1)
    for image in np.flatnonzero(missing_N):
        crops_N4[image] = _middle(int(height_N[image]), int(width_N[image]), ratio)
    return crops_N4


def flips(seed: int, epoch: int, first: int, count: int, share: float) -> np.ndarray:
    """Return whether the crops of samples `first` and on are mirrored, bool [count]."""
    return np.asarray(_uniform(sampling.words(seed, epoch, "place", count, first)[:, 2]) < share)


def _uniform(words: np.ndarray) -> np.ndarray:
    """Map words to numbers in [0, 1), float64."""
    return (words >> np.uint64(11)) * 2.0**-53


def _middle(height: int, width: int, ratio: tuple[float, float]) -> tuple[int, int, int, int]:
    """Return top, left, height, width of the largest crop in the middle whose width by height is within `ratio`."""
    rows, columns = height, width
    if width / height < ratio[0]:
        rows = round(width / ratio[0])
    elif width / height > ratio[1]:
        columns = round(height * ratio[1])
    return (height - rows) // 2, (width - columns) // 2, rows, columns
