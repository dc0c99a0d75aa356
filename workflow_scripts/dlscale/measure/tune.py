"""Stage `tune`: the loader, threads and batch size with which a run is fastest, found by short trials.

All combinations of what the run's key `tune` lists are tried by successive halving; the best of them then meets the
run's own setting in a duel. A trial is FULL of the stage `throughput`: training steps on
what the loader delivers. A setting that cannot be measured, or takes too much memory, is noted with the reason.

`tune.json` has all that was tried. `tuned.yaml` is a configuration file with a plan: the run, and the run with what
won. It changes no run that is there, least of all the one that was tuned, which would then have to be tuned again.
Where the run's own setting was not beaten it is empty.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import logging
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dlscale.config.run import RunCore, Tune, load_run, loader_classes
from dlscale.core.errors import UserError
from dlscale.core.files import write_text
from dlscale.core.noise import halved, ratio_interval
from dlscale.core.progress import Progress
from dlscale.core.settings import flat, nested, validate
from dlscale.core.text import size
from dlscale.measure.tuning import Duel, Tried, Tuning
from dlscale.measure.usage import Meter
from dlscale.measure.window import training_batches
from dlscale.parallel.rendezvous import describe_device
from dlscale.parallel.world import World, synchronize
from dlscale.train import memory
from dlscale.train.around import entered
from dlscale.train.build import Session, open_session, own_threads
from dlscale.train.exhaustion import is_exhaustion
from dlscale.train.loop import Hook, run_steps

#: From a setting's number and the seconds to measure for, to its samples/s; None where it cannot be measured.
Measure = Callable[[int, float], float | None]

#: Samples/s of settings, turn by turn.
Rates = dict[int, list[float]]

#: Of each rung; even, so that what grows steadily cancels out.
TURNS = 2

#: Share of the time that is for the duel, where there is something to search before it.
DUEL = 0.5

#: Uncounted steps of a trial, beside one for each of the loader's workers: each has a batch ready when the first comes.
WARM_UP = 2
#: And of the first trial of a step: compilation, choice of kernels, recording of a graph
#: (`dlscale.train.graph.EAGER_STEPS_OF_RANKS`).
FIRST_WARM_UP = 12


def main(args: argparse.Namespace) -> None:
    """Tune the run in `args.config` on the data of `args.manifest`; write `tune.json`, `tuned.yaml` into `args.out`."""
    run = load_run(args.config, "tune")
    if not all(args.run.partition(".")):
        raise UserError(f"--run: {args.run}: expected PLAN.RUN")
    with entered(run, args.manifest, args.device) as (world, _):
        found = tune(run, args.manifest, world, args.threads).model_copy(update={"run": args.run})
        if world.main:
            file = Path(args.out) / "tuned.yaml"
            if found.changes:
                files = [
                    *([] if "--configfile" in args.call else ["--configfile"]),
                    str(file),
                    "--",
                    f"plan_{found.plan}",
                ]
                command = f"{args.call} {shlex.join(files)}"
                found = found.model_copy(update={"command": command})
            found.write(Path(args.out) / "tune.json")
            write_text(file, tuned(found, run.study))


def tune(run: Any, manifest: str | Path, world: World, threads: int | None = None) -> Tuning:
    """Return what was tried of a run, and what came of it; every rank returns the same.

    `threads` are a node's, which its ranks share; PyTorch's own number if None.
    """
    settings: Tune = run.tune
    began = time.perf_counter()
    cores = max(1, (threads or torch.get_num_threads() * run.processes.gpus_per_node) // run.processes.gpus_per_node)
    changes = candidates(run, cores, world.device)
    duel_seconds = settings.seconds * (DUEL if len(changes) > 2 else 1)
    logging.info("%d settings; %.0f s are measured", len(changes), settings.seconds)
    with contextlib.closing(_Trials(run, manifest, world, cores, changes)) as trials:
        sizes = rungs(len(changes) - 1, settings.keep)
        total = TURNS * sum(number + 1 for number in sizes) + 2 * settings.rounds
        with Progress("tuning", total, "trials") as trials.progress:
            best, found = search(len(changes), trials, settings.seconds - duel_seconds, settings.keep)
            meter = Meter()
            rates = in_turns([best, 0], trials, settings.rounds, duel_seconds / settings.rounds / 2) if best else {}
            # Each rank reads the machine's counters at a moment of its own: all say what the first one saw.
            usage = world.gather(meter.usage(world))[0]
    duel = None
    if best and best in rates:
        rounds = list(zip(rates[best], rates[0], strict=True))
        ratio, low, high = ratio_interval(rounds)
        duel = Duel(challenger=best, rates=rounds, ratio=ratio, low=low, high=high, usage=usage)
    tuning = Tuning(
        device=describe_device(world.device),
        settings=settings.model_dump(mode="json"),
        seconds=time.perf_counter() - began,
        candidates=[
            Tried(
                changes=change,
                rates=[rung[number] for rung in found if number in rung],
                peak_memory_bytes=trials.peaks.get(number),
                problem=trials.problems.get(number),
            )
            for number, change in enumerate(changes)
        ],
        duel=duel,
    )
    logging.info("%s", tuning.verdict())
    if "batch_size" in tuning.changes:
        logging.warning("another batch size changes what is learnt: the learning rate may have to follow")
    return tuning


# ---- the search: successive halving, where every measurement is noisy --------------------------------
#
# A machine drifts, by more than many settings differ. So settings are measured in turns, and every second turn goes
# backwards: whatever is the same for neighbours, and whatever grows steadily, cancels out of their ratios. What the
# search finds is the luckiest of many as much as the best; hence the duel, in which that setting and the run's own are
# measured anew.


def in_turns(numbers: Sequence[int], measure: Measure, turns: int, seconds: float) -> Rates:
    """Measure settings so many times, each second time in the opposite order; one that fails drops out."""
    rates: Rates = {number: [] for number in numbers}
    for turn in range(turns):
        for number in list(rates) if turn % 2 == 0 else reversed(list(rates)):
            rate = measure(number, seconds)
            if rate is None:
                del rates[number]
            else:
                rates[number].append(rate)
    return rates


def rungs(others: int, keep: float) -> list[int]:
    """Return how many settings beside the run's own each rung measures; one that is alone is not measured."""
    return [size for size in halved(others, 1 / keep) if size > 1]


def search(count: int, measure: Measure, seconds: float, keep: float) -> tuple[int | None, list[Rates]]:
    """Return the best of settings 1 … `count` - 1, if any can be measured, and what each rung measured of them.

    All rungs take about as long, and so many seconds together. Setting 0, the run's own, goes through all of them; of
    the others the best share `keep` of each goes on. Within a turn they come in the order of their numbers.
    """
    others, found = list(range(1, count)), list[Rates]()
    planned = rungs(len(others), keep)
    for most in planned:
        if len(others) > 1:  # some may have failed
            shared = seconds / len(planned) / TURNS / (most + 1)
            rates = in_turns([0, *sorted(others[:most])], measure, TURNS, shared)
            found.append(rates)
            others = sorted(rates.keys() - {0}, key=lambda number: -statistics.geometric_mean(rates[number]))
    return next(iter(others), None), found


# ---- what is tried ---------------------------------------------------------------------------------


def candidates(run: Any, cores: int, device: torch.device) -> list[dict[str, Any]]:
    """Return what each setting changes of the run, by dotted key; the first one, its own, changes nothing.

    `cores` are those of a process. What a loader has no key for is not varied, nor its prefetching where no worker
    could work ahead.
    """
    space: Tune = run.tune
    own = _tunable(run.model_dump(mode="json"))
    doubled = itertools.takewhile(lambda count: count <= cores, (2**power for power in itertools.count()))
    counts = space.workers or [0, *doubled]
    threads = space.threads or ([cores, max(1, cores // 2)] if device.type == "cpu" else [])
    found = [own]
    # Those that share a batch size, and so a step, follow each other; the run's own first.
    batches = sorted(space.batch_size or [run.batch_size], key=lambda size: size != run.batch_size)
    for batch, kind, number in itertools.product(batches, space.loaders or [run.loader.kind], threads or [run.threads]):
        base = own["loader"] if kind == run.loader.kind else {"kind": kind}
        for workers, prefetch in itertools.product(counts, space.prefetch):
            varied = {"workers": workers, **({"prefetch": prefetch} if workers else {})}
            known = {key: value for key, value in varied.items() if key in loader_classes()[kind].model_fields}
            # All of a process's cores are what it has anyway.
            same = number == (run.threads or cores)
            found.append({"loader": base | known, "batch_size": batch, "threads": run.threads if same else number})
    changes = [_difference(each, own) for each in found]
    return [change for place, change in enumerate(changes) if change not in changes[:place]]


def _tunable(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: settings[key] for key in ("loader", "batch_size", "threads")}


def _difference(settings: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the values in `settings` that differ from those in `own`, by dotted key."""
    before = flat(own)
    # The keys of another kind of loader mean another thing, even if they are called the same.
    other = settings["loader"]["kind"] != own["loader"]["kind"]
    return {
        key: value
        for key, value in flat(settings).items()
        if value != before.get(key) or (other and key.startswith("loader."))
    }


def changed(run: RunCore, changes: dict[str, Any]) -> RunCore:
    """Return the run with these changes; what does not go together is a `UserError`."""
    settings, over = run.model_dump(mode="json"), nested(changes)
    loader = over.pop("loader", {})
    settings["loader"] = loader if "kind" in loader else settings["loader"] | loader
    return validate(type(run), settings | over, where="tune")


# ---- how it is tried -------------------------------------------------------------------------------


class _Trials:
    """Measures settings by number, as `Measure`: the same decisions on all ranks.

    One step is there at a time: settings that share a batch size share it, and the loader is opened for each trial.
    """

    def __init__(self, run: Any, manifest: str | Path, world: World, cores: int, changes: list[dict[str, Any]]) -> None:
        self.peaks: dict[int, int] = {}  #: Bytes by setting.
        self.problems: dict[int, str] = {}
        self.limit = memory.total(world.device, run.processes.gpus_per_node) * run.tune.memory
        self.progress: Progress | None = None
        self._run, self._manifest, self._world, self._changes = run, manifest, world, changes
        self._threads = cores * run.processes.gpus_per_node
        self._session: Session | None = None
        self._epoch = 0

    def __call__(self, number: int, seconds: float) -> float | None:
        """Return FULL samples/s of all ranks together; None, and a problem noted, if the setting cannot be measured.

        Of the run's own setting a problem is raised. A rank that fails where the others wait for its gradients ends
        the stage: no setting can be left then.
        """
        rate, peak, error = 0.0, 0, None
        memory.reset_peak(self._world.device)
        try:
            session, fresh = self._open(changed(self._run, self._changes[number]))
            rate, peak = self._trial(session, seconds, FIRST_WARM_UP if fresh else WARM_UP)
        except Exception as raised:  # whatever it is, the other settings do not depend on it
            error = raised
            self._close()  # a step that failed on its way may be of no more use
        problem = next((each for each in self._world.gather(_reason(error) if error else "") if each), "")
        if problem and number == 0:
            raise error or UserError(f"another process failed: {problem}")
        if not problem:
            peak = int(*self._world.max(peak))
            self.peaks[number] = max(peak, self.peaks.get(number, 0))
            if number and peak > self.limit:
                problem = f"takes {size(peak)} of memory; at most {size(self.limit)} is allowed"
        if problem:
            self.problems[number] = problem
            logging.info("%s is left out: %s", self._changes[number], problem)
        if self.progress:
            self.progress.update(self.progress.done + 1)
        return None if problem else rate

    def _open(self, run: RunCore) -> tuple[Session, bool]:
        """Return the session of a setting, and whether its step is new."""
        fresh = self._session is None or self._session.run.batch_size != run.batch_size
        if fresh:
            self._close()
            self._session = open_session(run, self._manifest, self._world, self._threads)
        assert self._session is not None
        torch.set_num_threads(own_threads(run, self._threads) or 1)
        return replace(self._session, run=run), fresh

    def _close(self) -> None:
        """Free the memory of the step."""
        self._session = None
        gc.collect()
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()

    close = _close

    def _trial(self, session: Session, seconds: float, warm_up: int) -> tuple[float, int]:
        """Return samples/s of steps that take about so long, and bytes in use; no trial sees the samples of another."""
        world, counts = session.world, list[int]()
        count = Hook(after_step=lambda number, batch, loss: counts.append(len(batch[0])))
        warm_up += getattr(session.run.loader, "workers", 0)
        self._epoch += 1
        with (
            contextlib.closing(session.loader("train")) as loader,
            contextlib.closing(training_batches(session, loader, self._epoch)) as batches,
        ):
            run_steps(session.step, batches, range(warm_up))
            synchronize(world.device)
            world.barrier()
            start, elapsed, done = time.perf_counter(), 0.0, 0
            while elapsed < 0.9 * seconds or not done:
                # Two steps tell how many there is time for.
                steps = max(1, round((seconds - elapsed) * done / elapsed)) if done else 2
                run_steps(session.step, batches, range(done, done + steps), [count])
                done += steps
                synchronize(world.device)
                (elapsed,) = world.max(time.perf_counter() - start)
            peak = memory.peak(world.device)
            if world.device.type == "cpu":
                peak += memory.of_children()  # while the loader's are there
        return sum(world.gather(sum(counts))) / elapsed, peak


def _reason(error: Exception) -> str:
    """Return in a line why a setting cannot be measured."""
    if is_exhaustion(error):
        return "out of memory"
    text = str(error).strip().splitlines() or [""]
    return text[0] if isinstance(error, UserError) else f"{type(error).__name__}: {text[0]}"


# ---- what is written -------------------------------------------------------------------------------


def tuned(found: Tuning, study: str) -> str:
    """Return YAML for `--configfile`: a plan of the run's own setting and of what won; none if nothing did."""
    import yaml

    comments = [f"Written by the stage tune of {found.run}.", found.verdict()]
    content = {}
    if found.changes:
        plan = {
            "study": study,
            "title": f"{found.run}, tuned",
            "from": found.run,
            # The run's own setting is timed beside the other; whether it trains, too, is its own plan's to say.
            "only": {"train": ["tuned"]},
            "runs": {"own": {"use": found.run}, "tuned": {"label": "tuned", **nested(found.changes)}},
        }
        content = {"plans": {found.plan: plan}}
        if "batch_size" in found.changes:
            comments.append("Another batch size changes what is learnt: the learning rate may have to follow.")
        comments += [
            "To train with it, and time it beside the run's own setting:",
            f"  {found.command}",
            f"In another plan, with this file among its --configfile: {{from: {found.plan}.tuned}}",
        ]
    return "".join(f"# {line}\n" for line in comments) + str(yaml.safe_dump(content, sort_keys=False))
