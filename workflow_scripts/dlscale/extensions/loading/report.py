"""Sum up the loader records of a program's processes, and derive a table and advice."""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dlscale.core.errors import UserError
from dlscale.core.files import read_json
from dlscale.core.text import NONE, aligned, many, number, percent, size
from dlscale.extensions.loading.extension import VARIABLE
from dlscale.extensions.loading.records import Advice, Array, Fetch, Loader, Loading, ProcessFile
from dlscale.extensions.loading.striping import striping
from dlscale.report.evidence import Evidence, Finding
from dlscale.report.figures import Fold, Item, Link, Section
from dlscale.report.sections import Page
from dlscale.results import MIN_FRACTION, PlanResult

#: Name of the record in the folder of a result.
NAME = "loading.json"

#: Minimum number of batches of a loader, without the first batch of each epoch, for advice.
MIN_BATCHES = 10

#: Limits for reporting chunks: minimum bytes read per byte used, and minimum fraction of a batch's time in reads.
MIN_RATIO, MIN_READS = 2.0, 0.3

#: Copies from pageable memory: assumed rate, bytes/s, and minimum fraction of a step that is reported.
PAGEABLE, MIN_COPIES = 6e9, 0.01

#: Minimum fraction of the requests without a ready batch at which a larger prefetch helps.
MIN_EMPTY = 0.05

#: Workers are fast enough if their time per batch is below this fraction of a step's time.
FAST_WORKERS = 0.8

#: Part of a batch's time → its name in the table.
PARTS = {
    "read": "reads",
    "decode": "decoding images (PIL)",
    "transform": "transform",
    "collate": "collate",
    "dataset": "rest of the dataset",
}


class LoaderWatch:
    """Loader details of `dlscale measure --loader`."""

    #: Variables of the program's environment.
    environment: Mapping[str, str] = {VARIABLE: "1"}

    def finish(self, steps: Path, folder: Path) -> list[str]:
        """Write `loading.json` into the result's folder; return the table and the advice, as lines for a terminal."""
        loading = read_loading(steps)
        loading.write(folder / NAME)
        advice = [f"  Advice: {loading.advice.sentence}"] if loading.advice else []
        return [*(f"  {line}" for line in aligned(table(loading))), *advice, ""]


# ---- reading -----------------------------------------------------------------------------------------


def read_loading(steps: Path) -> Loading:
    """Read and sum up the files of all processes in the folder of steps."""
    files = list[ProcessFile]()
    for path in sorted(steps.glob("loader.*[0-9]")):
        try:
            files.append(ProcessFile.checked(read_json(path), str(path)))
        except (OSError, UserError, ValueError) as error:  # a killed process, or a full disk
            logging.warning("%s: skipped: %s", path, error)
    mains = [file for file in files if file.loaders]
    fetched = defaultdict[tuple[str, int, int], list[Fetch]](list)
    for file in files:
        if file.worker:
            place = _place(file, mains)
            if place:
                fetched[place].append(file.worker)
    found = list[Loader]()
    for file in mains:
        for number_, loader in enumerate(file.loaders):
            fetches = [*fetched[file.host, file.pid, number_], loader.fetch]
            found.append(loader.model_copy(update={"fetch": _sum(fetches), "seeds": []}))
    loading = Loading(
        device=next((file.device for file in mains if file.device), ""),
        cores=min((file.cores for file in mains), default=1),
        processes=max(Counter(file.host for file in mains).values(), default=0),
        loaders=_same_loaders(found),
        arrays=_same_arrays(array for file in files for array in file.arrays),
        stopped=next((file.stopped for file in files if file.stopped), ""),
    )
    return loading.model_copy(update={"advice": advise(loading)})


def _place(file: ProcessFile, mains: Sequence[ProcessFile]) -> tuple[str, int, int] | None:
    """Return host, process id and number of the loader to which a worker belongs; None if unknown."""
    assert file.worker
    # With the start method `forkserver`, a worker's parent is the fork server.
    near = sorted(mains, key=lambda main: (main.host != file.host, main.pid != file.parent))
    for main in near:
        for number_, loader in enumerate(main.loaders):
            if main.host == file.host and file.worker.seed in loader.seeds:
                return main.host, main.pid, number_
    return None


def _sum(fetches: Sequence[Fetch]) -> Fetch:
    parts = Counter[str]()
    for fetch in fetches:
        parts.update(fetch.parts)
    return Fetch(
        first=max((fetch.first for fetch in fetches), default=0.0),
        batches=sum(fetch.batches for fetch in fetches),
        seconds=sum(fetch.seconds for fetch in fetches),
        cpu=sum(fetch.cpu for fetch in fetches),
        parts=dict(parts),
        transforms=list(dict.fromkeys(name for fetch in fetches for name in fetch.transforms)),
    )


def _same_loaders(loaders: Sequence[Loader]) -> list[Loader]:
    """Sum up the loaders of all processes that have the same settings and were made in the same line."""
    same = defaultdict[tuple[object, ...], list[Loader]](list)
    for each in loaders:
        settings = (each.dataset, each.length, each.workers, each.batch_size, each.pin_memory, each.persistent)
        same[(*settings, each.made, each.order)].append(each)
    sums = ("batches", "waited", "firsts", "first_waited", "requests", "ready", "empty", "sized", "bytes", "pinned")
    return [
        group[0].model_copy(
            update={
                **{name: sum(getattr(each, name) for each in group) for name in sums},
                "between": [time for each in group for time in each.between],
                "fetch": _sum([each.fetch for each in group]),
            }
        )
        for group in same.values()
    ]


def _same_arrays(arrays: Iterable[Array]) -> list[Array]:
    """Sum up the reads of several processes from arrays with the same name and layout; add the striping."""
    same = defaultdict[tuple[object, ...], list[Array]](list)
    for each in arrays:
        same[each.kind, each.name, each.dtype, str(each.chunks), each.compression].append(each)
    sums = ("opens", "requests", "seconds", "requested", "touched", "measured_used", "measured_read")
    found = list[Array]()
    for group in same.values():
        regions = Counter[str]()
        for each in group:
            regions.update(each.regions)
        more = {
            **{name: sum(getattr(each, name) for each in group) for name in sums},
            "files": max(each.files for each in group),
            "regions": dict(regions),
            "stripes": striping(group[0].file),
        }
        found.append(group[0].model_copy(update=more))
    return sorted(found, key=lambda each: -each.seconds)


# ---- figures of a loader -----------------------------------------------------------------------------


def wait_of(loader: Loader) -> float:
    """Return the mean wait for a batch, without the first batch of each epoch, seconds."""
    return loader.waited / loader.batches if loader.batches else 0.0


def step_of(loader: Loader) -> float:
    """Return the median time from a batch to the request of the next batch, seconds."""
    return statistics.median(loader.between) if loader.between else 0.0


def fetch_of(loader: Loader) -> float | None:
    """Return the mean time to fetch a batch in one process, seconds; None if unknown.

    The first batch counts only if no other batch was fetched.
    """
    fetch = loader.fetch
    return fetch.seconds / fetch.batches if fetch.batches else fetch.first or None


def parts_of(loader: Loader) -> dict[str, float]:
    """Return the seconds per batch of each key of `PARTS`; empty if unknown."""
    fetch = loader.fetch
    if not fetch.batches:
        return {}
    known = {name: fetch.parts.get(name, 0.0) / fetch.batches for name in PARTS if name != "dataset"}
    return {**known, "dataset": max(0.0, fetch.seconds / fetch.batches - sum(known.values()))}


def _total(loader: Loader) -> float:
    """Return the time of a loader's epochs, without pauses, seconds."""
    return loader.first_waited + loader.waited + step_of(loader) * (loader.batches + loader.firsts)


# ---- advice ------------------------------------------------------------------------------------------


def advise(loading: Loading) -> Advice | None:
    """Return advice on the most expensive problem of a loader; None if all problems cost little time."""
    total = sum(map(_total, loading.loaders))
    found = list[Advice]()
    for loader in loading.loaders:
        if loader.batches >= MIN_BATCHES and total:
            each = [_waits(loader, loading), _starts(loader), _copies(loader, loading)]
            part = _total(loader) / total
            which = f" This is the loader made at {loader.made}." if loader.made and len(loading.loaders) > 1 else ""
            found += [one.model_copy(update={"share": part * one.share, "why": one.why + which}) for one in each if one]
    found = [one for one in found if one.share >= (MIN_COPIES if one.cause == "copies" else MIN_FRACTION)]
    return max(found, key=lambda one: one.share, default=None)


def _starts(loader: Loader) -> Advice | None:
    """Report workers that start anew in each epoch."""
    if loader.persistent or not loader.workers or loader.firsts < 3:
        return None
    mean = loader.first_waited / loader.firsts
    return Advice(
        cause="starts",
        what="Workers start anew in each epoch",
        why=f"The first batch of an epoch arrives after {_time(mean)}, other batches after {_time(wait_of(loader))} "
        "on average.",
        todo="Set persistent_workers=True in the DataLoader.",
        share=max(0.0, loader.first_waited - loader.firsts * wait_of(loader)) / (_total(loader) or 1.0),
    )


def _copies(loader: Loader, loading: Loading) -> Advice | None:
    """Report copies to the device from pageable memory."""
    step = wait_of(loader) + step_of(loader)
    if not loader.sized or loader.pinned >= loader.bytes / 2 or not step:
        return None
    each = loader.bytes / loader.sized
    pinning = (
        "Define a method pin_memory in the batches' class, because pin_memory=True alone does not pin their tensors"
        if loader.pin_memory
        else "Set pin_memory=True in the DataLoader"
    )
    return Advice(
        cause="copies",
        what="Pageable copies",
        why=f"Batches of {size(each)} are in pageable memory, and the model is on the device {loading.device}.",
        todo=f"{pinning}, and copy with .to(device, non_blocking=True).",
        share=min(1.0, each / PAGEABLE / step),
    )


def _waits(loader: Loader, loading: Loading) -> Advice | None:
    """Report why the program waits for batches."""
    wait, step, fetch, workers = wait_of(loader), step_of(loader), fetch_of(loader), loader.workers
    share = wait / (wait + step) if wait + step else 0.0
    if not fetch or share < MIN_FRACTION:
        return None
    arrives = wait + step if workers else fetch  # seconds per batch
    needed = max(math.ceil(max(workers, 1) * arrives / max(step, 1e-9)), workers + 1)
    # Each process and each worker needs a CPU. `cores` counts the CPUs that one process may use; all ranks usually use
    # the same CPUs.
    fits = max(loading.processes, 1) * (needed + 1) <= loading.cores
    parts = parts_of(loader)
    largest = max(parts, key=lambda name: parts[name], default="")
    fraction = parts[largest] / sum(parts.values()) if largest else 0.0
    named = {"transform": f"The transform ({', '.join(loader.fetch.transforms)})", "read": "Reading"}
    named["decode"] = "Decoding images"
    name = named.get(largest, f"The {PARTS.get(largest)}")
    mostly = f"{name} takes {percent(fraction)} of a batch's {_time(fetch)}." if fraction >= 0.5 else ""
    who = many(workers, "worker") if workers else "The training process"
    rates = f"{who} delivered {_rate(arrives)}; the program could process {_rate(step)}"
    rates += f": {many(needed, 'worker')} suffice{'s' * (needed == 1)}." if fits else "."

    def advice(cause: str, what: str, why: Iterable[str], todo: str) -> Advice:
        return Advice(cause=cause, what=what, why=" ".join(filter(None, why)), todo=todo, share=share)

    array = next((each for each in loading.arrays if (each.ratio or 0.0) >= MIN_RATIO), None)
    if array and fraction and parts["read"] >= MIN_READS * sum(parts.values()):
        return _wasted(array, share, parts["read"] / sum(parts.values()))
    if workers and fetch / workers < FAST_WORKERS * step:
        why = [f"A worker fetches a batch in {_time(fetch)}, but {who} delivered a batch only every {_time(arrives)}."]
        if loader.empty >= loader.requests / 2:
            send = "Send less: smaller types (uint8, float16), fewer and larger tensors, or decoding on the device."
            return advice("transfer", "Slow transfer from workers", why, send)
        if loader.empty < MIN_EMPTY * loader.requests:  # batches were ready, so another program probably took the time
            return None
        prefetch = 2 * (loader.prefetch or 2)
        return advice("uneven", "Uneven batches", why, f"Set prefetch_factor={prefetch} in the DataLoader.")
    if fits and (needed == workers + 1 or largest != "transform" or not mostly):
        return advice("workers", "Too few workers", [rates, mostly], f"Set num_workers={needed} in the DataLoader.")
    slow = {"transform": "Slow transform", "collate": "Slow collate_fn", "read": "Slow reads"}
    slow["decode"] = "Slow decoding"
    todo = {
        "decode": "Store smaller or decoded images, or decode on the device.",
        "transform": "Make the transform faster, transform batches on the device, or store transformed data.",
        "collate": "Make collate_fn faster, or let the dataset return tensors of one size.",
        "read": "Store the data uncompressed, in chunks of one sample, on a faster disk.",
    }.get(largest, "Store the data in the form that the model takes, so that there is less to decode.")
    why = [mostly or f"A batch takes {_time(fetch)} ({_shown_parts(loader)}).", rates]
    return advice(largest if largest in slow else "dataset", slow.get(largest, "Slow dataset"), why, todo)


def _wasted(array: Array, share: float, reads: float) -> Advice:
    ratio, chunk = array.ratio or 1.0, math.prod(array.chunks or []) * array.itemsize
    # HDF5 drops its cache of a dataset when the dataset is closed.
    reopened = array.cache >= chunk and array.opens > array.requests / 2
    keep = f"Keep the dataset open (x = file['{array.name.strip('/')}'], once in each worker), or store" * reopened
    layout = f"Chunks of {array.kind} {array.name} are {_shape(array.chunks)}"
    layout = layout if array.chunks else f"{array.kind} {array.name} is contiguous"
    return Advice(
        cause="chunks",
        what="Wasted reads",
        why=f"{layout}, requests are {array.region or 'of unknown shape'}, so {percent(1 - 1 / ratio)} of "
        f"the bytes read are unused, and reads take {percent(reads)} of a batch's time.",
        todo=f"{keep or 'Store'} the data in chunks of the requested shape.",
        share=share,
    )


def cause(evidence: Evidence) -> Finding | None:
    """Find the loader's most expensive problem, from the record of `dlscale measure --loader`."""
    file = evidence.folder / NAME if evidence.folder else None
    if file is None or not file.is_file() or not (advice := Loading.read(file).advice):
        return None
    return Finding("loading", advice.what.lower(), advice.why, advice.todo, advice.share)


# ---- table -------------------------------------------------------------------------------------------


def table(loading: Loading) -> list[tuple[str, str]]:
    """Return rows (name, text) on each loader and each array."""
    rows = list[tuple[str, str]]()
    for loader in loading.loaders:
        rows += _loader_rows(loader, loading)
    if not loading.loaders:
        rows.append(
            (
                "loader",
                "unknown: no batch of PyTorch's DataLoader was seen; other loaders, such as DALI's, are not timed",
            )
        )
    for array in loading.arrays:
        rows.append((f"{array.kind} {array.name}", _array_text(array)))
    if loading.stopped:
        rows.append(("incomplete", f"dlscale stopped watching a process's loaders: {loading.stopped}"))
    return rows


def _loader_rows(loader: Loader, loading: Loading) -> list[tuple[str, str]]:
    about = [many(loader.workers, "worker") if loader.workers else "no workers"]
    about += [f"{loader.batch_size} samples per batch"] if loader.batch_size else []
    about += [f"{loader.length:,} samples"] if loader.length is not None else []
    about += [f"made at {loader.made}" + f" (dataset {loader.order + 1})" * bool(loader.order)] if loader.made else []
    rows = [("loader", f"{loader.dataset}, {', '.join(about)}")]
    if (fetch := fetch_of(loader)) is not None:
        where = "a worker" if loader.workers else "the training process"
        rows.append((f"  batch in {where}", f"{_time(fetch)}: {_shown_parts(loader)}"))
    if loader.batches:
        text = f"waits {_time(wait_of(loader))} per batch, then takes {_time(step_of(loader))}"
        first = f"; first batch of an epoch: {_time(loader.first_waited / loader.firsts)}" if loader.firsts else ""
        rows.append(("  training process", text + first))
    if loader.requests:
        most = (loader.prefetch or 0) * loader.workers
        ready = f"{number(loader.ready / loader.requests, 2)} of at most {most}"
        rows.append(("  ready batches", f"{ready}; none at {percent(loader.empty / loader.requests)} of the requests"))
    if loader.sized:
        kind = "pinned" if loader.pinned == loader.bytes else "pageable"
        kind = kind if loader.pinned in (0, loader.bytes) else "partly pinned"
        text = f"{size(loader.bytes / loader.sized)} per batch from {kind} memory" if loader.bytes else "none"
        rows.append((f"  copies to {loading.device}", text))
    else:
        pinned = "on" if loader.pin_memory else "off"
        reason = "the model is on the CPU" if loading.device == "cpu" else "unknown device of the model"
        rows.append(("  copies to a device", f"none seen ({reason}); pin_memory is {pinned}"))
    return rows


def _shown_parts(loader: Loader) -> str:
    parts = parts_of(loader)
    if not parts:
        return "only the first batch was seen"
    names = {**PARTS, "transform": f"transform ({', '.join(loader.fetch.transforms)})"}
    return ", ".join(f"{names[name]} {_time(seconds)}" for name, seconds in parts.items() if seconds >= 1e-6)


def _array_text(array: Array) -> str:
    layout = f"chunks {_shape(array.chunks)}" if array.chunks else "contiguous"
    parts = [f"{layout} {array.dtype}", f"requested {array.region}" if array.region else ""]
    ratio = f"{number(array.ratio)} bytes read per byte used" if array.ratio else "bytes read unknown or from memory"
    parts += [ratio, array.compression or "not compressed", f"cache {size(array.cache)}" if array.cache else ""]
    parts += [many(array.files, "file") if array.files > 1 else "", array.stripes]
    mean = f"{_time(array.seconds / array.requests)} per request" if array.requests else ""
    return ", ".join(filter(None, [*parts, mean]))


def _shape(chunks: Sequence[int] | None) -> str:
    return " × ".join(map(str, chunks or [])) or NONE


def _time(seconds: float) -> str:
    return f"{number(1e3 * seconds)} ms"


def _rate(seconds: float) -> str:
    return f"{number(1 / max(seconds, 1e-9))} batches/s"


def section(plan: PlanResult, page: Page) -> Section | None:
    """Return the table and the advice of each run that was measured with `--loader`; None without such runs."""
    folds = list[Fold]()
    for run in plan.runs:
        if (file := run.folder / NAME).is_file():
            loading = Loading.read(file)
            items = [Item(name.strip(), text) for name, text in table(loading)]
            advice = [loading.advice.sentence] if loading.advice else []
            folds.append(Fold(Link(run.called, f"#{plan.anchor(run)}"), "", advice, items=items, open=True))
    return Section("Loaders", folds=folds) if folds else None
