"""The context of every stage of a run: ranks meet and test their exchanges, and data are verified."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from dlscale.config.run import RunCore
from dlscale.core.errors import UserError
from dlscale.data import staging
from dlscale.data.manifest import Manifest
from dlscale.parallel.records import Links
from dlscale.parallel.rendezvous import join
from dlscale.parallel.selftest import self_test
from dlscale.parallel.world import World
from dlscale.train.exhaustion import explained


@contextlib.contextmanager
def entered(
    run: RunCore, manifest: str | Path, device: str, splits: Sequence[str] = ("train", "valid")
) -> Iterator[tuple[World, Links | None]]:
    """Meet the other ranks of a run and verify the files of its `splits`; yield the ranks and their links.

    An allocation that fails within this context becomes a message.
    """
    with join(run.processes, device) as world, explained(run, manifest, world):
        links = self_test(world, run.selftest)
        verify(Manifest.read(manifest), splits, world)
        yield world, links


def verify(manifest: Manifest, splits: Sequence[str], world: World) -> None:
    """Raise a `UserError` if data files are damaged; each rank reads its share of the unverified ones."""
    manifest.check_files()
    files = world.gather(staging.unverified(manifest, splits))[0]
    messages = world.gather(staging.damaged(manifest, files[world.rank :: world.size]))
    if any(messages):
        raise UserError("; ".join(itertools.chain(*messages)))
    if world.main:
        staging.remember(manifest, files)
