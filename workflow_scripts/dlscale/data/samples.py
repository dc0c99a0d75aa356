"""Samples of a split, as loaders read them.

`Samples.read` returns one sample, and all loaders that read data must deliver the same values (except for rounding in
`CroppedImages`). Subclasses allow faster loaders:
`GridSamples` return the positions of boxes and the formula that decodes them, `WritingSamples` write themselves into a
batch, and `CroppedImages` return windows of images.

An input and a target are trees: an array, or nested tuples and dicts of arrays.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from dlscale.config.laws import check_fields
from dlscale.core.errors import UserError
from dlscale.data.manifest import FieldInfo, Manifest
from dlscale.data.sampling import Visits
from dlscale.data.store import Reader

if TYPE_CHECKING:
    from dlscale.data.kind import RowSamples


#: Types of a tree's nodes, made once: making `tuple | list | dict` at each check would take longer than the check.
NODES = (tuple, list, dict)


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Call a function for each leaf of `tree` (and the same leaves of `others`); return the tree of the results.

    As in PyTorch's pytree, nodes are tuples, named tuples, lists, dicts, `OrderedDict` and `defaultdict`. Instances of
    other subclasses are leaves.
    """
    if not isinstance(tree, NODES):
        return function(tree, *others)
    from torch.utils import _pytree  # here, because DALI's processes do not import PyTorch

    return _pytree.tree_map(function, tree, *others)


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree, in order."""
    if not isinstance(tree, NODES):
        return [tree]
    from torch.utils import _pytree

    return _pytree.tree_leaves(tree)


def samples_in(tree: Any) -> int:
    """Return the number of samples in a tree of arrays [B, ...], such as the inputs of a batch."""
    return len(tree_leaves(tree)[0])


@dataclass(frozen=True)
class ArraySpec:
    """Shape and type of an array of one sample; if the shapes of samples differ, the largest shape."""

    shape: tuple[int, ...]  #: (C, ...), channels first, for fields and images; () for labels and scalars
    dtype: str = "float32"  #: `uint8` for images, `int64` for labels
    #: number of classes, None if unknown; labels are 0 ... classes - 1, also in the loader `synthetic`
    classes: int | None = None


class Samples(Protocol):
    """The samples of one split."""

    size: int  #: samples in an epoch
    input_spec: Any  #: `ArraySpec` of the input, or a tree of `ArraySpec`
    target_spec: Any  #: `ArraySpec` of the target, or a tree of `ArraySpec`
    #: The study's function that makes a batch (see `Study.collate`); None to stack the arrays of all samples
    collate: Callable[[list[Any]], tuple[Any, Any]] | None = None
    #: Function that returns the loader, if samples are computed from other samples on the model's device. Its arguments
    #: are a function that opens a loader of the other samples, the `Share` and the device. None: nothing is computed
    open_computed_loader: Callable[..., Any] | None = None

    def read(self, epoch: int, index: int) -> tuple[Any, Any]:
        """Return input and target of sample `index` of `epoch`, in model units, with equal values in every process.

        Both are trees of NumPy arrays, with the structure, shapes and types of `input_spec` and `target_spec`.
        """
        ...


class WritingSamples(Samples):
    """Samples that write themselves into batches."""

    @abstractmethod
    def writers(self, epoch: int, indices: range, x: Any, y: Any) -> list[Callable[[], None]]:
        """Return tasks that write samples `indices` into the arrays [n, ...] of the trees `x` and `y`.

        Any threads may run the tasks, in any order.
        """

    def read(self, epoch: int, index: int) -> tuple[Any, Any]:
        x = tree_map(lambda spec: np.empty((1, *spec.shape), spec.dtype), self.input_spec)
        y = tree_map(lambda spec: np.empty((1, *spec.shape), spec.dtype), self.target_spec)
        for write in self.writers(epoch, range(index, index + 1), x, y):
            write()
        return tree_map(lambda values: np.asarray(values[0]), x), tree_map(lambda values: np.asarray(values[0]), y)


class TableSamples(WritingSamples):
    """Samples that are rows of arrays; a device's memory may hold all arrays."""

    bytes: int  #: size of all rows of all arrays, bytes

    @abstractmethod
    def table(self) -> tuple[Any, Any]:
        """Return all inputs and all targets, trees of arrays [N, ...], as `input_spec` and `target_spec` declare."""

    @abstractmethod
    def order(self, epoch: int) -> np.ndarray:
        """Return the row of each sample of an epoch, int64 [size]."""


@dataclass(frozen=True)
class ImageWindows:
    """Windows of n images, each resized; a sample is a square of the resized window, perhaps mirrored."""

    images: list[np.ndarray]  #: encoded files, uint8 [bytes] each, or pixels, uint8 [H, W, 3] each
    labels: np.ndarray  #: int64 [n]
    corner: np.ndarray  #: first row and column of the window, int64 [n, 2]
    extent: np.ndarray  #: height and width of the window, int64 [n, 2]
    resized: np.ndarray  #: height and width after resizing, int64 [n, 2]
    start: np.ndarray  #: first row and column of the square, int64 [n, 2]
    flip: np.ndarray  #: whether the square is mirrored left to right, bool [n]


class CroppedImages(WritingSamples):
    """Samples that are windows of images, uint8 [3, size, size], with a label.

    Pixels may differ between decoders, because decoders round differently.
    """

    @property
    @abstractmethod
    def encoded(self) -> bool:
        """Whether images are JPEG or PNG files instead of pixels."""

    @abstractmethod
    def windows(self, epoch: int, indices: range) -> ImageWindows:
        """Return the windows of samples `indices` of `epoch`."""


def decoding(info: FieldInfo, scaling: tuple[np.ndarray, np.ndarray] | None) -> np.ndarray:
    """Return shift, factor, offset, float32 [3, C]: model value = (stored - shift) * factor + offset.

    `scaling` is `Reader.scaling`. Without scaling, the shift is the offset of the channel's transform, usually
    the channel's mean, because subtracting it first keeps more digits.
    """
    transforms = info.transforms if info.stored == "physical" else []
    mean, std = (  # rounded to float32, like the statistics in .npy files
        np.array([getattr(t, key) for t in transforms] or [plain] * len(info.channels), np.float32).astype(float)
        for key, plain in (("offset", 0.0), ("scale", 1.0))
    )
    if scaling is None:
        numbers = mean, 1 / std, 0 * mean
    else:
        offset, scale = (values.astype(float) for values in scaling)
        numbers = 0 * mean, scale / std, (offset - mean) / std
    return np.stack(numbers).astype(np.float32)


@dataclass(frozen=True)
class BoxIndex:
    """Positions of the boxes of n samples."""

    file: np.ndarray  #: number of the file, int64 [n]
    input: np.ndarray  #: first cell of the input's box along the three axes other than channels, int64 [n, 3]
    target: np.ndarray  #: first cell of the target's box, int64 [n, 3]
    symmetry: np.ndarray  #: number of the symmetry applied to both boxes, int64 [n]

    def __len__(self) -> int:
        return len(self.file)

    def take(self, indices: range) -> BoxIndex:
        s = slice(indices.start, indices.stop)
        return BoxIndex(self.file[s], self.input[s], self.target[s], self.symmetry[s])


class Symmetries(Protocol):
    """Symmetries of boxes, by number; 0 is the identity."""

    axes: np.ndarray  #: axis of the box that becomes each axis of the result, int64 [S, 3]
    flips: np.ndarray  #: whether each axis of the result runs backwards, bool [S, 3]
    source: np.ndarray  #: source channel of each channel of the result, int64 [S, C]
    sign: np.ndarray  #: factor 1 or -1 of each channel of the result, float32 [S, C]

    def apply(self, number: int, x: np.ndarray) -> np.ndarray:
        """Return a transformed copy of the box [C, a, b, c]."""
        ...


class DecodePlan(NamedTuple):
    """Formula that decodes the boxes of B samples with C channels, in numpy or on a device.

    Positions and steps are counted in values. For a symmetry, the same memory is read in another order:

        out[c, i, j, k] = (stored[p] - shift[c]) factor[c] + offset[c],
        p = base + channel[c] + i step[0] + j step[1] + k step[2]
    """

    places: Any  #: base, step [3], channel [C], int64 [B, 4 + C]
    numbers: Any  #: shift, factor, offset, float32 [B, 3, C]


class BoxField:
    """Input or target of samples on grids: boxes [C, a, b, c] of one size in one field of every file.

    Parameters
    ----------
    name
        Field of the files: volumes [C, D, H, W] or series [T, C, H, W], whose boxes are [C, T, H, W].
    extent
        Size of a box along the three axes other than channels.

    Attributes
    ----------
    shape
        Shape of a stored box: (C, *extent).
    spec
        Shape and type (float32) of a delivered box; a box with a single time has no time axis.
    """

    def __init__(
        self,
        manifest: Manifest,
        split: str,
        name: str,
        extent: tuple[int, int, int],
        symmetries: Symmetries | None = None,
    ) -> None:
        self._info = manifest.fields[name]
        assert self._info.channel_axis is not None
        files = manifest.files(split)
        self.readers = [Reader(manifest.path(file), name) for file in files]
        #: Digests of the files, and the common beginning of the paths of their mirrors (copies for other loaders).
        self.digests, self.stem = [file.digest for file in files], manifest.folder / "mirrors" / f"{split}-{name}"
        self.extent, self.symmetries, self.channel_axis = extent, symmetries, self._info.channel_axis
        self.shape = (len(self._info.channels), *extent)
        single = self.channel_axis == 1 and extent[0] == 1
        self.spec = ArraySpec((len(self._info.channels), *extent[single:]))
        self._decoding: dict[int, np.ndarray] = {}

    def decoding(self, file: int) -> np.ndarray:
        """Return shift, factor and offset of a file (see the function `decoding`), float32 [3, C]."""
        if file not in self._decoding:
            self._decoding[file] = decoding(self._info, self.readers[file].scaling)
        return self._decoding[file]

    def read(self, file: int, start: np.ndarray, symmetry: int) -> np.ndarray:
        """Return the box at `start` [3] as the model takes it: float32, shape `spec.shape`, any memory order.

        Operations without effect are skipped, which saves time if values need no decoding.
        """
        values = self.stored(file, start).astype(np.float32, copy=False)
        shift, factor, offset = self.decoding(file)
        for operation, numbers, neutral in ((np.subtract, shift, 0), (np.multiply, factor, 1), (np.add, offset, 0)):
            if (numbers != neutral).any():
                operation(values, numbers[:, None, None, None], out=values)
        if symmetry:
            assert self.symmetries is not None
            values = self.symmetries.apply(symmetry, values)
        return values.reshape(self.spec.shape)

    def stored(self, file: int, start: np.ndarray) -> np.ndarray:
        return np.moveaxis(self.readers[file].stored(self._index(start, self.extent)), self.channel_axis, 0)

    def copy(self, file: int, start: np.ndarray, out: np.ndarray) -> None:
        """Copy the stored box at `start` [3] into `out` [C, a, b, c], of any size; see `Reader.copy`."""
        index = self._index(start, out.shape[1:])
        self.readers[file].copy(index, np.moveaxis(out, 0, self.channel_axis))

    def _index(self, start: np.ndarray, extent: tuple[int, ...]) -> tuple[slice, ...]:
        box = [slice(int(first), int(first) + size) for first, size in zip(start, extent, strict=True)]
        box.insert(self.channel_axis, slice(None))
        return tuple(box)

    # ---- stored values of all files, for loaders that copy them before decoding

    @functools.cached_property
    def dtype(self) -> np.dtype[Any]:
        """Type of buffers for stored values: float16 if all files store float16, else float32."""
        return np.dtype(np.float16 if all(r.dataset.dtype == np.float16 for r in self.readers) else np.float32)

    @functools.cached_property
    def _decodings(self) -> np.ndarray:
        return np.stack([self.decoding(file) for file in range(len(self.readers))])  # [files, 3, C]

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """Axes of boxes (0: channels) in the memory order of buffers and of the first file, slowest first."""
        return self.order_of(0)

    def order_of(self, file: int) -> tuple[int, ...]:
        axes = list(range(4))
        axes.insert(self.channel_axis, axes.pop(0))
        return tuple(axes[axis] for axis in self.readers[file].order)

    def shape_of(self, file: int) -> tuple[int, ...]:
        """Return the shape of all values of a file, [C, a, b, c]."""
        shape = list(self.readers[file].shape)
        shape.insert(0, shape.pop(self.channel_axis))
        return tuple(shape)

    def mapped(self, file: int) -> np.ndarray | None:
        """Return all stored values of a file, [C, a, b, c], if they are contiguous in the mapped file, else None."""
        values = self.readers[file].mapped
        return None if values is None else np.moveaxis(values, self.channel_axis, 0)

    def map(self) -> None:
        """Open and map all files; call this before several threads read the files."""
        for reader in self.readers:
            reader.chunks  # noqa: B018 - opens and maps the file

    @property
    def bytes(self) -> int:
        """Size of all files' stored values in type `dtype`, bytes."""
        return sum(int(np.prod(self.shape_of(file))) for file in range(len(self.readers))) * self.dtype.itemsize

    def canonical(self, stored: np.ndarray) -> np.ndarray:
        """Reorder the last four axes of an array from `order` to boxes [..., C, a, b, c]."""
        return np.moveaxis(stored, [axis - 4 for axis in range(4)], [axis - 4 for axis in self.order])

    def strides(self, boxes: np.ndarray) -> np.ndarray:
        """Return the strides of the last four axes of boxes [..., C, a, b, c], in values, int64 [4]."""
        return np.array(boxes.strides[-4:]) // self.dtype.itemsize

    def plan(self, file: np.ndarray, symmetry: np.ndarray, base: np.ndarray, stride: np.ndarray) -> DecodePlan:
        """Return the formula that decodes the boxes of B samples; `file` and `symmetry` [B] are as in `BoxIndex`.

        `base`, int64 [B], is the position of each box's first value. `stride`, int64 [B, 4] or [1, 4], is the distance
        between neighbouring cells along C and the box's three axes, in values.
        """
        count, channels = len(file), self.shape[0]
        if (turns := self.symmetries) is None:
            axes, flips = np.tile(np.arange(3), (count, 1)), np.zeros((count, 3), bool)
            source, sign = np.tile(np.arange(channels), (count, 1)), np.ones((count, channels), np.float32)
        else:
            axes, flips = turns.axes[symmetry], turns.flips[symmetry]
            source, sign = turns.source[symmetry], turns.sign[symmetry]
        stride = np.broadcast_to(stride, (count, 4))
        step, last = np.take_along_axis(stride[:, 1:], axes, axis=1), np.array(self.extent)[axes] - 1
        base = base + (flips * last * step).sum(axis=1)
        numbers = np.ascontiguousarray(np.take_along_axis(self._decodings[file], source[:, None], axis=2))
        numbers[:, 1:] *= sign[:, None]
        return DecodePlan(np.column_stack([base, np.where(flips, -step, step), source * stride[:, :1]]), numbers)


class GridSamples(Samples):
    """Samples (input and target) that are boxes of stored arrays."""

    def __init__(self, input: BoxField, target: BoxField) -> None:
        self.input, self.target = input, target
        self.input_spec, self.target_spec = input.spec, target.spec

    @abstractmethod
    def boxes(self, epoch: int) -> BoxIndex:
        """Return the positions of the boxes of an epoch's samples."""

    def read(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        boxes = self.boxes(epoch)
        file, symmetry = int(boxes.file[index]), int(boxes.symmetry[index])
        x = self.input.read(file, boxes.input[index], symmetry)
        return x, self.target.read(file, boxes.target[index], symmetry)


# ---- rows of fields of any shape and dtype: for kinds without a `samples` module


class RowField:
    """Rows [n, ...] of one field of every file, in model units; labels are int64, whatever their stored type."""

    def __init__(self, manifest: Manifest, split: str, key: str, name: str) -> None:
        self._info = info = manifest.fields[name]
        if info.channel_axis == 0:
            raise UserError(f"samples.{key}: field '{name}' holds volumes [C, D, H, W]; expected one sample per row")
        stored = "float32" if info.stored == "physical" else info.dtype
        # The loader `synthetic` draws integers up to the highest stored value (so that tokens and masks are valid), at
        # most 255.
        highest = int(max(info.maximum, default=0)) if np.dtype(info.dtype).kind in "iu" else 0
        among = info.classes or (min(highest, 255) + 1 if highest > 0 else None)
        self.spec = ArraySpec(info.row_shape, "int64" if info.classes else stored, among)
        self._readers = [Reader(manifest.path(file), name) for file in manifest.files(split)]
        self._numbers: dict[int, np.ndarray | None] = {}

    def fill(self, file: int, rows: np.ndarray, out: np.ndarray) -> None:
        """Write rows [n] of one file into `out` [n, ...], decoded and in the type of `spec`."""
        reader = self._readers[file]
        if file not in self._numbers:
            self._numbers[file] = self._decoding(reader)
        mapped, numbers = reader.mapped, self._numbers[file]
        if mapped is not None and numbers is None and mapped.dtype == out.dtype:
            # mode="clip", because with the default "raise" numpy would first write into a copy of `out`.
            np.take(mapped, rows, axis=0, out=out.reshape(len(rows), *mapped.shape[1:]), mode="clip")
            return
        if mapped is None:
            stored = np.concatenate([reader.stored((slice(row, row + 1),)) for row in rows.tolist()])
        else:
            stored = mapped[rows]
        values = stored.astype(self.spec.dtype).reshape(out.shape)
        out[...] = values if numbers is None else (values - numbers[0]) * numbers[1] + numbers[2]

    def _decoding(self, reader: Reader) -> np.ndarray | None:
        """Return shift, factor and offset, [3, C, 1, ...], if a file's rows must be decoded, else None."""
        info, scaling = self._info, reader.scaling
        if scaling is None and info.stored == "model":
            return None
        channels = [] if info.channel_axis is None else [len(info.channels)]
        return decoding(info, scaling).reshape(3, *channels, *[1] * len(info.grid))


class Rows(TableSamples):
    """Samples that are rows of all files, in the order of `Visits`."""

    def __init__(self, manifest: Manifest, split: str, settings: RowSamples, seed: int) -> None:
        check_fields(settings, manifest.fields)
        fields = [
            tree_map(functools.partial(RowField, manifest, split, key), getattr(settings, key))
            for key in ("input", "target")
        ]
        self.input_spec, self.target_spec = (tree_map(lambda field: field.spec, tree) for tree in fields)
        self._fields = tree_leaves(fields)
        self._counts = [file.rows for file in manifest.files(split)]
        training = split == "train"
        self.visits = Visits(self._counts, settings.train if training else settings.valid, seed, training)
        self.size = self.visits.size
        row = sum(math.prod(field.spec.shape) * np.dtype(field.spec.dtype).itemsize for field in self._fields)
        self.bytes = sum(self._counts) * row

    def writers(self, epoch: int, indices: range, x: Any, y: Any) -> list[Callable[[], None]]:
        files, rows = (each[indices.start : indices.stop] for each in self.visits.rows(epoch))
        batch = [*tree_leaves(x), *tree_leaves(y)]
        return [functools.partial(self._fill, file, files, rows, batch) for file in np.unique(files).tolist()]

    def _fill(self, file: int, files: np.ndarray, rows: np.ndarray, batch: list[np.ndarray]) -> None:
        here = np.flatnonzero(files == file)
        for field, out in zip(self._fields, batch, strict=True):
            if len(here) == len(files):
                field.fill(file, rows, out)
            else:
                part = np.empty((len(here), *out.shape[1:]), out.dtype)
                field.fill(file, rows[here], part)
                out[here] = part

    def table(self) -> tuple[Any, Any]:
        rows = sum(self._counts)
        x, y = tree_map(lambda spec: np.empty((rows, *spec.shape), spec.dtype), (self.input_spec, self.target_spec))
        first = 0
        for file, count in enumerate(self._counts):
            for field, out in zip(self._fields, tree_leaves((x, y)), strict=True):
                field.fill(file, np.arange(count), out[first : first + count])
            first += count
        return x, y

    def order(self, epoch: int) -> np.ndarray:
        return self.visits.order(epoch)


open_samples = Rows
