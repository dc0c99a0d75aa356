"""Stage `tune`: find the fastest loader, threads and batch size of a run, by successive halving and a duel.

`tune.json` lists all trials. `tuned.yaml` is a configuration file with a plan that compares the run with the winning
candidate. The file has no plan if no candidate is significantly faster than the run's original settings.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import logging
import math
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from dlscale.config.run import RunCore, Tune, load_run, loader_classes
from dlscale.core.errors import UserError, brief
from dlscale.core.files import write_text
from dlscale.core.noise import halved, interval
from dlscale.core.progress import Progress
from dlscale.core.settings import nested, validate
from dlscale.data.samples import samples_in
from dlscale.extensions.tune.records import Duel, Tried, Tuning
from dlscale.parallel.world import World, synchronize
from dlscale.train.around import is_exhaustion, run_context
from dlscale.train.build import Session, open_session, own_cores, own_threads
from dlscale.train.loop import Hook, run_steps

#: Function: (number of a candidate, seconds to measure) → samples/s, None if the candidate cannot be measured.
Measure = Callable[[int, float], float | None]

#: Number of a candidate → samples/s of each turn.
Rates = dict[int, list[float]]

#: Number of turns per rung; in a turn, each candidate is timed once. An even number cancels a steady drift.
TURNS = 2

#: Fraction of the stage's time that the duel takes if a search precedes the duel.
DUEL = 0.5

#: Warm-up steps of a trial. One step per worker of the loader is added, because each worker has a batch ready at the
#: start.
WARM_UP = 2
#: Warm-up steps of the first trial with a new model, for compilation, choice of kernels and recording of a CUDA graph
#: (`dlscale.train.step.EAGER_STEPS_OF_RANKS`).
FIRST_WARM_UP = 12


def main(args: argparse.Namespace) -> None:
    """Tune the run in `args.config` on the data of `args.manifest`; write the results into `args.out`."""
    run = load_run(args.config, "tune")
    with run_context(run, args.manifest, args.device) as (world, _):
        found = tune(run, args.manifest, world, args.threads).model_copy(update={"run": args.run})
        if world.main:
            write(found, args, run.study)


def write(found: Tuning, args: argparse.Namespace, study: str) -> None:
    """Write `tune.json`, and `tuned.yaml` with the command that uses it, into `args.out`."""
    file = Path(args.out) / "tuned.yaml"
    if found.changes:
        flag = [] if "--configfile" in args.call else ["--configfile"]
        files = shlex.join([*flag, str(file), "--", f"plan_{found.plan}"])
        found = found.model_copy(update={"command": f"{args.call} {files}"})
    found.write(Path(args.out) / "tune.json")
    write_text(file, tuned(found, study))


def tune(run: Any, manifest: str | Path, world: World, threads: int | None = None) -> Tuning:
    """Measure the candidates of a run; return the same record on every rank.

    `threads`: CPU threads per node.
    """
    cores = own_cores(run, threads) or torch.get_num_threads()
    changes = candidates(run, cores, world.device)
    return compete(
        run.tune, changes, lambda progress: contextlib.closing(_Trials(run, manifest, world, cores, changes, progress))
    )


def compete(
    settings: Tune,
    changes: Sequence[dict[str, Any]],
    open_trials: Callable[[Progress], contextlib.AbstractContextManager[Any]],
) -> Tuning:
    """Search for the best candidate, then time this candidate in a duel."""
    # `open_trials` returns a context with a `Measure`. The attribute `problems` of the `Measure` has the reasons for
    # skipped candidates. In the duel the attribute `keeps` is true: an external program is then paused between its
    # turns, not started again.
    began, duel_seconds = time.perf_counter(), settings.seconds * (DUEL if len(changes) > 2 else 1)
    with (
        # Trials of the search, and of the duel.
        Progress(
            "tuning",
            TURNS * sum(number + 1 for number in rungs(len(changes) - 1)) + 2 * settings.rounds,
            "trials",
        ) as progress,
        open_trials(progress) as trials,
    ):
        best, found = search(len(changes), trials, settings.seconds - duel_seconds)
        trials.keeps = True
        rates = in_turns([best, 0], trials, settings.rounds, duel_seconds / settings.rounds / 2) if best else {}
    tuning = Tuning(
        seconds=time.perf_counter() - began,
        candidates=[
            Tried(
                changes=change,
                rates=[rung[number] for rung in found if number in rung],
                problem=trials.problems.get(number),
            )
            for number, change in enumerate(changes)
        ],
        duel=duel(best, rates),
    )
    logging.info("%s", tuning.verdict())
    return tuning


def duel(best: int | None, rates: Rates) -> Duel | None:
    """Return the result of the duel between a candidate and the original settings; None if there was no duel."""
    if not best or best not in rates:
        return None
    rounds = list(zip(rates[best], rates[0], strict=True))
    ratio, low, high = ratio_interval(rounds)
    return Duel(challenger=best, rates=rounds, ratio=ratio, low=low, high=high)


def ratio_interval(rounds: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the ratio of two quantities and the ends of its 95 % interval.

    The two quantities were measured alternately (paired timing). `interval` computes the interval from the logarithms
    of the ratios, one ratio per round.
    """
    centre, reach = interval([math.log(first / second) for first, second in rounds])
    return math.exp(centre), math.exp(centre - reach), math.exp(centre + reach)


# ---- the search: successive halving, where every measurement is noisy --------------------------------
#
# A candidate is one combination of settings; candidate 0 is the run's original settings. Candidates are measured in
# turns, every second turn in reverse order, so that the machine's drift cancels from their ratios. The best candidate
# of a search may only have been lucky. Therefore a duel measures the best candidate and the original settings again.


def in_turns(numbers: Sequence[int], measure: Measure, turns: int, seconds: float) -> Rates:
    """Measure all candidates `turns` times, every second time in reverse order; drop failed candidates."""
    rates: Rates = {number: [] for number in numbers}
    for turn in range(turns):
        for number in list(rates) if turn % 2 == 0 else reversed(list(rates)):
            rate = measure(number, seconds)
            if rate is None:
                del rates[number]
            else:
                rates[number].append(rate)
    return rates


def rungs(others: int) -> list[int]:
    """Return the number of candidates of each rung, without candidate 0; a single candidate needs no rung."""
    return [size for size in halved(others, 2) if size > 1]


def search(count: int, measure: Measure, seconds: float) -> tuple[int | None, list[Rates]]:
    """Return the best of candidates 1 … `count` - 1 (None if all fail), and the rates of each rung.

    All rungs take the same time. Candidate 0 takes part in all rungs. The faster half of the other candidates is
    promoted to the next rung.
    """
    others, found = list(range(1, count)), list[Rates]()
    planned = rungs(len(others))
    for most in planned:
        if len(others) > 1:  # a single candidate may be left if candidates failed in earlier rungs
            shared = seconds / len(planned) / TURNS / (most + 1)
            rates = in_turns([0, *sorted(others[:most])], measure, TURNS, shared)
            found.append(rates)
            others = sorted(rates.keys() - {0}, key=lambda number: -statistics.geometric_mean(rates[number]))
    return next(iter(others), None), found


# ---- candidates --------------------------------------------------------------------------------------


def candidates(run: Any, cores: int, device: torch.device) -> list[dict[str, Any]]:
    """Return the changes of each candidate to the run: dotted key → value; empty for candidate 0.

    `cores`: number of logical CPUs per process. Prefetching is not varied without workers. Candidates never change the
    run's staging of data.
    """
    space: Tune = run.tune
    doubled = itertools.takewhile(lambda count: count <= cores, (2**power for power in itertools.count()))
    workers = space.workers or [0, *doubled]
    threads = space.threads or ([cores, max(1, cores // 2)] if device.type == "cpu" else [])
    # Candidates with the same batch size follow each other, because they use the same model. The run's batch size
    # comes first.
    batches = sorted(space.batch_size or [run.batch_size], key=lambda size: size != run.batch_size)
    kinds, counts = space.loaders or [run.loader.kind], threads or [run.threads]
    # All candidates whose loader has the setting `staging` keep the run's staging.
    staging = getattr(run.loader, "staging", "none")
    staged: dict[str, Any] = {} if staging == "none" else {"staging": staging}
    found: list[dict[str, Any]] = [{}]
    for batch, kind, count, working, ahead in itertools.product(batches, kinds, counts, workers, space.prefetch):
        # A key of another kind of loader has another meaning, even if the name is the same.
        own = run.loader.model_dump() if kind == run.loader.kind else {}
        loader = {"kind": kind, "workers": working, **({"prefetch": ahead} if working else {}), **staged}
        known = {key: value for key, value in loader.items() if key in loader_classes()[kind].model_fields}
        change = {f"loader.{key}": value for key, value in known.items() if value != own.get(key)}
        change |= {"batch_size": batch} if batch != run.batch_size else {}
        change |= {"threads": count} if count != (run.threads or cores) and count else {}
        if change not in found:
            found.append(change)
    return found


def changed(run: RunCore, changes: dict[str, Any]) -> RunCore:
    """Return the run with the changes; raise `UserError` if the result is not a valid run."""
    settings, over = run.model_dump(mode="json"), nested(changes)
    loader = over.pop("loader", {})
    settings["loader"] = loader if "kind" in loader else settings["loader"] | loader
    return validate(type(run), settings | over, where="tune")


# ---- measurement -----------------------------------------------------------------------------------


class _Trials:
    """Timer of candidates by number (a `Measure`); all ranks make the same decisions.

    Successive trials with the same batch size use the same model. Each trial opens a new loader.
    """

    def __init__(
        self,
        run: Any,
        manifest: str | Path,
        world: World,
        cores: int,
        changes: list[dict[str, Any]],
        progress: Progress,
    ) -> None:
        self.problems: dict[int, str] = {}
        self._run, self._manifest, self._world, self._changes, self._progress = run, manifest, world, changes, progress
        self._threads = cores * run.processes.gpus_per_node
        self._session: Session | None = None
        self._epoch = 0

    def __call__(self, number: int, seconds: float) -> float | None:
        """Return the training samples/s of all ranks together; if the candidate fails, note why and return None.

        A failure of candidate 0 is raised. If a rank fails while other ranks wait for this rank, the stage ends.
        """
        rate, error, problem = 0.0, None, ""
        try:
            rate = self._trial(changed(self._run, self._changes[number]), seconds)
        except Exception as raised:  # other candidates may still work
            error = raised
            problem = "out of memory" if is_exhaustion(error) else brief(error) or type(error).__name__
            self.close()  # after a failed step the model may be unusable
        problem = next(filter(None, self._world.gather(problem)), "")
        if problem and number == 0:
            raise error or UserError(f"another rank failed: {problem}")
        if problem:
            self.problems[number] = problem
            logging.info("%s: combination skipped: %s", self._changes[number], problem)
        self._progress.update(self._progress.done + 1)
        return None if problem else rate

    def close(self) -> None:
        """Free the memory of the model."""
        self._session = None
        gc.collect()
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _trial(self, run: RunCore, seconds: float) -> float:
        """Return the samples/s of steps that take about `seconds`; each trial uses another epoch."""
        warm_up = WARM_UP + getattr(run.loader, "workers", 0)
        if self._session is None or self._session.run.batch_size != run.batch_size:
            self.close()
            self._session = open_session(run, self._manifest, self._world, self._threads)
            warm_up += FIRST_WARM_UP - WARM_UP
        torch.set_num_threads(own_threads(run, self._threads) or 1)
        session, world, counts = replace(self._session, run=run), self._world, list[int]()
        count = Hook(after_step=lambda number, batch, loss: counts.append(samples_in(batch[0])))
        self._epoch += 1
        with (
            contextlib.closing(session.loader("train")) as loader,
            contextlib.closing(session.training_batches(loader, self._epoch)) as batches,
        ):
            run_steps(session.step, batches, range(warm_up))
            synchronize(world.device)
            world.barrier()
            start, elapsed, done = time.perf_counter(), 0.0, 0
            while elapsed < 0.9 * seconds or not done:
                # The first two steps show how many steps fit into the time.
                steps = max(1, round((seconds - elapsed) * done / elapsed)) if done else 2
                run_steps(session.step, batches, range(done, done + steps), [count])
                done += steps
                synchronize(world.device)
                (elapsed,) = world.max(time.perf_counter() - start)
        # Ranks that share a model (tp, cp) have the same samples, so only the first of them counts samples.
        return sum(world.gather(sum(counts) if world.lead else 0)) / elapsed


# ---- output ----------------------------------------------------------------------------------------


def tuned(found: Tuning, study: str) -> str:
    """Return YAML for `--configfile`; if a candidate won, with a plan that compares it with the original settings."""
    comments, plans = [f"Written by the stage tune of {found.run}.", found.verdict()], {}
    if found.changes:
        plans[found.plan] = {
            "study": study,
            "title": f"{found.run}, tuned",
            "from": found.run,
            # This plan only times the original settings. The run's own plan decides whether the run trains.
            "only": {"train": ["tuned"]},
            "runs": {"own": {"use": found.run}, "tuned": {"label": "tuned", **nested(found.changes)}},
        }
        if "batch_size" in found.changes:
            comments.append("Another batch size changes the training. Adjust the learning rate if necessary.")
        comments += [
            "To train with the tuned settings, and to compare their speed with the run's original settings:",
            f"  {found.command}",
            "To use the tuned settings in another plan, pass this file with --configfile, and write "
            f"`from: {found.plan}.tuned` in that plan.",
        ]
    content = yaml.safe_dump({"plans": plans} if plans else {}, sort_keys=False)
    return "".join(f"# {line}\n" for line in comments) + content
