"""Samples of time series: pairs of states in the same file, `dt` stored steps apart."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from dlscale.core.errors import UserError
from dlscale.data import sampling
from dlscale.data.manifest import File, Manifest
from dlscale.data.samples import ArraySpec, BoxField, BoxIndex, GridSamples, Samples
from dlscale.data.store import Reader
from dlscale.extensions.era5_vit.era5.extra import Extra

if TYPE_CHECKING:
    import torch

    from dlscale.data.loaders.base import Loader, Share
    from dlscale.extensions.era5_vit.era5.kind import PairSamples


class Pairs(GridSamples):
    """Pairs of states of a split: a file with T times has T - dt pairs.

    With a history, an input box has all times from the earliest state to the input: [C, 1 + steps back, H, W]. Except
    in training, times before a file's first state are read from the preceding file. Pairs with an incomplete history
    are left out.
    """

    def __init__(self, manifest: Manifest, split: str, settings: PairSamples, seed: int) -> None:
        files = manifest.files(split)
        rows, columns = manifest.fields["fields"].grid
        self._dt, self._back = settings.dt, max(settings.history, default=0)
        self._seed, self._training = seed, split == "train"
        states = BoxField(manifest, split, "fields", (1, rows, columns))
        windows = BoxField(manifest, split, "fields", (1 + self._back, rows, columns)) if self._back else states
        super().__init__(windows, states)
        # Runs of consecutive pairs: index of the reader, row of the first input in the reader, number of pairs, index
        # of the file, row of the first input in the file.
        runs: list[tuple[int, int, int, int, int]] = []
        for number, file in enumerate(files):
            pairs = max(file.rows - self._dt, 0)
            missing = min(self._back, pairs)  # pairs without a complete history in this file
            before = None if self._training else file_before(manifest, file)
            if missing and before and before.rows >= self._back:
                runs.append((len(states.readers), self._back, missing, number, 0))
                for field in (windows, states):
                    end = Reader(manifest.path(before), "fields")
                    field.readers.append(Joined(end, field.readers[number], self._back, missing + self._dt))
            runs.append((number, missing, pairs - missing, number, missing))
        self._reader, self._first, self._pairs, self._file, self._row = np.array(runs, np.int64).T
        self.available = int(self._pairs.sum())
        if not self.available:
            history = f" with a history of {self._back} steps (samples.history)" if self._back else ""
            raise UserError(
                f"{manifest.folder}: {split}: no pair of states {self._dt} steps apart (samples.dt){history} in files "
                f"with {', '.join(str(file.rows) for file in files)} times. Choose a smaller dt, a shorter history or "
                "a longer period"
            )
        wanted = settings.train if self._training else settings.valid
        self.size = min(wanted or self.available, self.available)
        self._among = self.size if settings.subset == "first" else self.available

    def _visited(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the run that contains each sample of an epoch, and the sample's position in this run."""
        pair = sampling.visits(self._seed, epoch, self._among, self.size, self._training)
        return sampling.locate(self._pairs, pair)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - an epoch's index serves all its samples; two epochs overlap
    def boxes(self, epoch: int) -> BoxIndex:
        run, number = self._visited(epoch)
        row = self._first[run] + number
        zero = np.zeros_like(row)
        x, y = (np.stack([time, zero, zero], axis=1) for time in (row - self._back, row + self._dt))
        return BoxIndex(self._reader[run], x, y, zero)

    def places(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the file's index in the split and the row of each input of an epoch; int64 [size] each."""
        run, number = self._visited(epoch)
        return self._file[run], self._row[run] + number


def file_before(manifest: Manifest, file: File) -> File | None:
    """Return the file, of any split, that ends one step before `file` begins; None without such a file."""
    digest = Extra.of(manifest).before.get(file.digest)
    return next((each for files in manifest.splits.values() for each in files if each.digest == digest), None)


class Joined(Reader):
    """The last rows of a file and the first rows of the next file, joined in memory, float32."""

    def __init__(self, before: Reader, after: Reader, last: int, first: int) -> None:
        super().__init__(after.path, after.name)
        self._parts = before, after, last, first

    def __reduce__(self) -> tuple[Any, ...]:
        return Joined, self._parts

    @property
    def dataset(self) -> h5py.Dataset:
        if self._opened is None or self._opened[0] != os.getpid():
            before, after, last, first = self._parts
            rows = before.shape[0]
            values = np.concatenate([before[rows - last : rows,], after[0:first,]])
            # HDF5 distinguishes files in memory by their names, so each name must be unique.
            memory = h5py.File(f"{self.path} after {before.path} {id(self)}", "w", driver="core", backing_store=False)
            self._opened = os.getpid(), memory.create_dataset(self.name, data=values)
        return self._opened[1]


class InformedPairs(Samples):
    """Pairs whose inputs are the state, the earlier states of the history, and the clock.

    Any loader reads the pairs (`boxes`). `InformedLoader` computes the inputs from the pairs and the clock's `numbers`.
    """

    def __init__(self, pairs: Pairs, manifest: Manifest, split: str, settings: PairSamples) -> None:
        self._extra, self._files = Extra.of(manifest), manifest.files(split)
        self._lags, self._clock = [0, *settings.history], settings.clock
        if self._clock and not self._extra.starts:
            raise UserError(
                f"{manifest.folder}: samples.clock: the times of these files are unknown; expected an HDF5 dataset "
                "`time` (hours since 1970-01-01) in each file, or years as file names. Add the times, or omit "
                "samples.clock"
            )
        channels, *grid = pairs.target_spec.shape
        self.boxes, self.size = pairs, pairs.size
        self.input_spec, self.target_spec = ArraySpec((settings.channels(channels), *grid)), pairs.target_spec

    def numbers(self, epoch: int) -> np.ndarray:
        """Return sine and cosine of each cycle in `samples.clock` for each input's time, float32 [size, 2 x cycles]."""
        file, row = self.boxes.places(epoch)
        if not self._clock:
            return np.zeros((len(row), 0), np.float32)
        hours = np.empty(len(row))
        for number in np.unique(file):
            hours[file == number] = self._extra.hours(self._files[number], row[file == number])
        date = np.datetime64("1970-01-01", "s") + (3600 * hours).astype("timedelta64[s]")
        day = (date - date.astype("datetime64[Y]")) / np.timedelta64(1, "D")
        turns = {"hour": hours / 24, "day": day / 365.25}
        angles = [2 * np.pi * (turns[hand] % 1) for hand in self._clock]
        return np.stack([wave(angle) for angle in angles for wave in (np.sin, np.cos)], axis=1).astype(np.float32)

    def arrange(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Return inputs [B, C, H, W], in new memory.

        First come the states of `x` [B, C, T, H, W], then the clock's `numbers` [B, K].
        """
        import torch

        states = [x[:, :, -1 - lag] for lag in self._lags] if x.dim() == 5 else [x]
        shown = numbers[:, :, None, None].to(x.dtype).expand(-1, -1, *states[0].shape[2:])
        return torch.cat([*states, shown], dim=1)

    def read(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        import torch

        x, y = self.boxes.read(epoch, index)
        numbers = torch.from_numpy(self.numbers(epoch)[index : index + 1])
        return self.arrange(torch.from_numpy(x)[None], numbers)[0].numpy(), y

    def open_computed_loader(self, build: Callable[[Samples], Loader], share: Share, device: torch.device) -> Loader:
        from dlscale.extensions.era5_vit.era5.informed import InformedLoader

        return InformedLoader(build(self.boxes), self, share, device)


def open_samples(manifest: Manifest, split: str, settings: PairSamples, seed: int) -> Samples:
    """Return the pairs of a split, with history and clock if these are set."""
    pairs = Pairs(manifest, split, settings, seed)
    return InformedPairs(pairs, manifest, split, settings) if settings.history or settings.clock else pairs
