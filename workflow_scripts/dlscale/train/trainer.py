"""Training epoch by epoch: validation, records, checkpoints."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch

from dlscale.config.run import Run, Schedule
from dlscale.core import ranges, registry
from dlscale.core.errors import Stopped, UserError
from dlscale.core.metrics import Best, Epoch, Untrained
from dlscale.data.loaders.base import Loader, Share
from dlscale.data.samples import samples_in
from dlscale.parallel.shards import Shard, own_shards
from dlscale.parallel.world import World
from dlscale.studies.base import Metrics
from dlscale.train.build import Session
from dlscale.train.checkpoint import CheckpointRecord, Checkpoints
from dlscale.train.loop import Batch, Hook, run_steps
from dlscale.train.step import Step, make_state, set_learning_rate
from dlscale.train.validation import metric_called, naive_means, validate
from dlscale.train.weight_files import load_weights

#: Remedies for a loss or gradient that is not finite.
ADVICE = (
    "If the data are correct, lower optimizer.lr, add schedule.warmup_steps, set optimizer.clip_norm, or use precision "
    "bf16 or fp32. Checkpoints of earlier epochs are kept"
)


class Request(IntEnum):
    """Request to a running training; a larger value is more urgent."""

    NONE = 0
    SAVE = 1
    END = 2


@contextlib.contextmanager
def training(run: Run, session: Session, checkpoints: Checkpoints, name: str = "RUN") -> Iterator[Trainer]:
    """Yield the trainer of a run, resumed from the run's newest checkpoint, or with the initial weights.

    `name` is the run's folder, for commands in messages.
    """
    with (
        contextlib.closing(session.loader("train")) as train,
        contextlib.closing(session.loader("valid")) as valid,
    ):
        metrics = session.study.metrics(run, session.manifest, session.world.device)
        trainer = Trainer(run, session.step, session.share(), (train, valid), metrics, checkpoints, session.world, name)
        trainer.resume()
        if run.training.weights and trainer.resumed_from is None:
            load_weights(session.step.weights, run.training.weights)
        yield trainer


class Trainer:
    """Trainer that validates after every epoch, and saves checkpoints after epochs and on signals.

    All ranks run this trainer, and each rank writes its part of the checkpoints. With `training.keep_best`, checkpoints
    include the weights of the best epoch.
    """

    def __init__(
        self,
        run: Run,
        step: Step,
        share: Share,
        loaders: tuple[Loader, Loader],
        metrics: Metrics,
        checkpoints: Checkpoints,
        world: World,
        name: str = "RUN",
    ) -> None:
        self.name = name  #: the run's folder, for commands in messages
        self.run, self.step, self.share, self.metrics, self.world = run, step, share, metrics, world
        self.checkpoints, (self.train_loader, self.valid_loader) = checkpoints, loaders
        self.total_steps = run.training.steps or len(self.train_loader) * (run.training.epochs or 0)
        #: number of epochs; `training.steps` may cut the last epoch short
        self.epochs = -(-self.total_steps // len(self.train_loader))
        #: last epoch before the training pauses (`stop_after`) or ends
        self.last_epoch = min(self.epochs, run.training.stop_after or self.epochs)
        self.last_step = min(self.total_steps, len(self.train_loader) * self.last_epoch)
        self.history: list[Epoch] = []  #: records of completed epochs
        self.resumed_from: int | None = None  #: step of the loaded checkpoint, if any
        self.best_weights: dict[str, Shard] | None = None  #: weights of the best epoch, on the host
        self._untrained: Untrained | None = None  #: loss and metrics before the first step
        self._resumed = CheckpointRecord()
        self._made_with = run.model_dump(mode="json", include={"geometry", "parallel", "threads", "loader"})
        self._made_with["geometry"].pop("memory_mb")  # a request to the scheduler, does not affect times
        at = run.geometry
        self._places = {
            "ranks": world.size,
            "tp": at.tp,
            "cp": at.cp,
            "order": at.order if at.model_size > 1 else "",
            "device": world.device.type,
        }
        self._naive: dict[str, torch.Tensor] | None = None  # mean validation errors of baselines without learning
        kept, self._target = run.training.keep_best, run.training.target
        self._judge = metric_called(kept, metrics, "training.keep_best") if kept else None
        self._best: Epoch | None = None  # kept, because searching a long history takes time
        self._goal = metric_called(self._target.metric, metrics, "training.target.metric") if self._target else None

    @property
    def best(self) -> Best | None:
        """Best epoch so far, whose weights are kept.

        None without `training.keep_best`, and before the end of the first epoch.
        """
        epoch = self._best
        if self._judge is None or epoch is None:
            return None
        return Best(metric=self._judge.name, value=self._judge.of(epoch), epoch=epoch.epoch, step=epoch.step)

    def _improves(self, record: Epoch) -> bool:
        """Return whether an epoch is better than all earlier epochs; if so, keep its record as the best."""
        known = [epoch for epoch in (self._best, record) if epoch]
        before, self._best = self._best, self._judge.best(known) if self._judge else None
        return self._best is not before

    def _reached(self, history: Sequence[Epoch]) -> Epoch | None:
        return self._goal.first(history, self._target.value) if self._goal and self._target else None

    def _end(self, history: Sequence[Epoch]) -> Epoch | None:
        return self._reached(history) if self._target and self._target.stop else None

    @property
    def _done(self) -> bool:
        return len(self.history) >= self.last_epoch or self._end(self.history) is not None

    def fit(
        self,
        on_epoch: Callable[[Epoch], object] = lambda record: None,
        on_begin: Callable[[Untrained], None] = lambda untrained: None,
        hooks: Sequence[Hook] = (),
        poll: Callable[[], Request] = lambda: Request.NONE,
    ) -> list[Epoch]:
        """Train, and return the records of all epochs.

        Training ends after the last epoch, or earlier if an epoch reaches the target and `training.target.stop` is set.
        If a loss or gradient is not finite, `training.on_divergence` decides. `on_begin` is called with the scores
        before the first step, and `on_epoch` after each epoch, with the epoch's record. `poll` is called before each
        batch, and returns the same request (to save or to end) on all ranks.
        """
        try:
            with contextlib.ExitStack() as later:
                hooks = [
                    Hook(before_step=lambda number: set_learning_rate(self.step.optimizer, self.rate(number))),
                    *hooks,
                ]
                if not self.history:
                    self._begin()
                    if self._untrained:
                        on_begin(self._untrained)
                policy, first, tried = self.run.training.on_divergence, len(self.history) + 1, self.resumed_from
                left_out = self._resumed.bad or any(record.skipped for record in self.history)
                if policy == "skip" or (policy == "roll_back" and left_out):
                    self.step.skip_bad()
                elif policy == "roll_back" and self.resumed_from is None:
                    self._save(0, untrained=self._untrained)
                while not self._done:
                    epoch = len(self.history)
                    if (record := self._epoch(epoch, poll, hooks)) is None:
                        self.checkpoints.wait()
                        self.resume()
                        self.resumed_from = tried  # a roll-back is part of this try
                        self.step.skip_bad()
                        continue
                    if record.epoch == first:  # files are open and code is compiled: shorter watchdog timeout
                        later.enter_context(ranges.part("epoch", ranges.BETWEEN))
                    with ranges.part("writing"):
                        on_epoch(record)
                    self.history.append(record)
                    if not (math.isfinite(record.train_loss) and math.isfinite(record.valid_loss)):
                        logging.warning("diverged in epoch %d: stopped (training.on_divergence: stop)", record.epoch)
                        break  # unsaved: the newest checkpoint has weights of an earlier epoch
                    if self.run.training.check_replicas:
                        registry.provided("check_replicas", None)(self.step, self.world, record.epoch)
                    if self._improves(record):
                        self.best_weights = {
                            name: shard.copy("cpu") for name, shard in self.step.weights.shards().items()
                        }
                    if self._done or policy == "roll_back" or (epoch + 1) % self.run.training.checkpoint_epochs == 0:
                        self._save(record.step)
        except Exception as error:
            # After any other error, other ranks may be gone, and waiting for their parts of the save could hang.
            if isinstance(error, UserError) or self.world.size == 1:
                self.checkpoints.wait()  # finishes a save of the last good state
            raise
        self.checkpoints.wait()
        return self.history

    def outcome(self) -> Iterator[str]:
        """Yield lines that describe the best epoch, and whether the target was reached."""
        if self._judge and (best := self.best):
            yield f"best: epoch {best.epoch} of {len(self.history)}, {self._judge.title} {best.value:.6g}"
        if self._goal and self._target:
            wanted, reached = f"target: {self._goal.aim(self._target.value)}", self._reached(self.history)
            if reached:
                yield f"{wanted}: reached after epoch {reached.epoch}, {reached.samples} samples"
            else:
                nearest = self._goal.best(self.history)
                yield f"{wanted}: not reached" + (f"; at best {self._goal.of(nearest):.6g}" if nearest else "")

    def _begin(self) -> None:
        """Validate before the first step, unless an earlier try of the run did so; epochs' times exclude this."""
        if self._untrained or self._resumed.step:
            return
        start = time.perf_counter()
        valid_loss, metrics = self.validate()
        self._untrained = Untrained(valid_loss=valid_loss, metrics=metrics)
        logging.info(f"before training: valid loss {valid_loss:.6f} ({time.perf_counter() - start:.1f} s)")

    def _with_first_loss(self, sums: _EpochSums) -> Untrained | None:
        """Return the scores before the first step, with the first batch's loss if known; call this on all ranks."""
        if self._untrained and sums.first_loss is not None:
            loss = float(self.world.sum(sums.first_loss.clone())) / min(self.run.batch_size, self.train_loader.samples)
            self._untrained = self._untrained.model_copy(update={"train_loss": loss})
        return self._untrained

    def _epoch(self, epoch: int, poll: Callable[[], Request], hooks: Sequence[Hook]) -> Epoch | None:
        """Train and validate an epoch; return its record, or None after bad steps if the training must roll back."""
        done, seen = (self.history[-1].step, self.history[-1].samples or 0) if self.history else (0, 0)
        steps = min(len(self.train_loader), self.total_steps - done)
        samples = min(steps * self.run.batch_size, self.train_loader.samples)
        before, self._resumed = self._resumed, CheckpointRecord()  # only a resumed epoch may begin in its middle
        first = max(before.step - done, 0)  # above 0 if training resumed in the middle of this epoch
        scored = registry.study(self.run.study).train_metrics
        sums = _EpochSums(before, range(done + first, done + steps), self.world, self.step, 1 + len(scored))
        made_with = self._made_with if not before.seconds or before.made_with == self._made_with else None
        requests = Hook(before_step=lambda number: self._obey(poll(), sums, made_with))
        batches = self.train_loader.epoch(epoch, first)
        weight = functools.partial(self.share.weight, samples=self.train_loader.samples)  # weight of this rank's loss
        weighted = ((x, y, weight(number)) for number, (x, y) in enumerate(batches, first))
        run_steps(self.step, weighted, sums.numbers, [requests, *hooks, Hook(after_step=sums.add)])
        totals = sums.total()  # waits for the device, so that the time of the epoch includes all work
        sums.finish()
        if bad := sums.bad():
            self._judge_steps(bad, steps)
            if not self.step.skips and self.run.training.on_divergence == "roll_back":
                return None
        known = samples - sum(self.share.count(n - done, self.train_loader.samples) for n in bad if self.step.skips)
        train_loss, *scores = (total / known for total in totals)
        requests.before_step(done + steps)  # obeys a request that arrived during the last step
        batches.close()
        self._naive_answers([requests])  # before `start`: the time of validation excludes baselines
        start = time.perf_counter()
        valid_loss, metrics = math.nan, dict[str, float]()
        if not bad or self.step.skips:
            valid_loss, metrics = self.validate([requests])
            if not math.isfinite(valid_loss) and self.run.training.on_divergence != "stop":
                raise UserError(f"epoch {epoch + 1}: the validation loss is {valid_loss}. {ADVICE}")
        return Epoch(
            epoch=epoch + 1,
            step=done + steps,
            samples=seen + samples,
            learning_rate=self.rate(done + steps - 1),
            train_loss=train_loss,
            valid_loss=valid_loss,
            epoch_seconds=sums.seconds,
            samples_per_second=samples / sums.seconds,
            valid_seconds=time.perf_counter() - start,
            valid_samples=self.valid_loader.samples,
            valid_steps=len(self.valid_loader),
            wall_time=sums.wall_time,
            metrics=metrics,
            train_metrics=dict(zip(scored, scores, strict=True)),
            skipped=len(bad) * self.step.skips,
            made_with=made_with,
            untrained=None if self.history else self._with_first_loss(sums),
        )

    def _judge_steps(self, bad: Mapping[int, int], steps: int) -> None:
        """Log the bad steps of an epoch of `steps` steps; raise `UserError` if the training must not continue."""
        epoch, batch = divmod(first := min(bad), len(self.train_loader))
        start = batch * self.run.batch_size
        text = (
            f"epoch {epoch + 1}: the {('update', 'loss')[bad[first] - 1]} of step {first + 1} is NaN or infinite"
            f"{f', the first of {len(bad)} such steps of {steps}' * self.step.skips} (seed {self.run.seed}, epoch "
            f"{epoch + 1}, samples {start} to {start + self.share.count(batch, self.train_loader.samples) - 1}); "
            f"`dlscale batch {self.name} --step {first + 1}` shows this batch"
        )
        if (2 * len(bad) > steps) if self.step.skips else (self.run.training.on_divergence == "fail"):
            raise UserError(
                f"{text}. {'More than half of the steps are bad. ' * self.step.skips}{ADVICE}"
                + ". on_divergence: skip leaves such steps out" * (not self.step.skips)
            )
        logging.warning("%s%s", text, ". Left out" * self.step.skips)

    def rate(self, number: int) -> float:
        """Return the learning rate of step `number`."""
        peak = peak_rate(self.run.schedule, self.run.optimizer.lr, self.run.batch_size)
        return learning_rate(self.run.schedule, peak, number, self.total_steps, len(self.train_loader))

    def validate(self, hooks: Sequence[Hook] = ()) -> tuple[float, dict[str, float]]:
        """Return the loss and the metrics over all validation samples; each sample counts once."""
        with ranges.part("validation"):
            naive = self._naive_answers(hooks)
            return validate(self.run.study, self.step, self.metrics, self.valid_loader, self.world, hooks, naive)

    def _naive_answers(self, hooks: Sequence[Hook] = ()) -> dict[str, torch.Tensor]:
        if self._naive is None:
            self._naive = naive_means(self.metrics, self.valid_loader, self.share, self.world, hooks)
        return self._naive

    def resume(self) -> None:
        """Load the newest usable checkpoint, unless training must restart; all ranks load the same checkpoint."""
        loaded = self.checkpoints.load(self._wanted, until=self.last_step)
        again = self._again(loaded[0]) if loaded else None
        if loaded is None or again:
            self.step.optimizer.state.clear()  # a failed read may have left a state from `_wanted`
            if again:
                logging.info("%s", again)
                if self.world.main:
                    self.checkpoints.clear()
                self.world.barrier()
            return
        self._resumed, state = loaded
        step = self._resumed.step
        self._untrained = self._resumed.untrained
        self.history, self.resumed_from = list(self._resumed.history), step
        self._best = self._judge.best(self.history) if self._judge else None
        if self._best:
            place = "best" if self._resumed.best else "model"
            self.best_weights = {
                name.removeprefix(f"{place}."): shard.copy("cpu")
                for name, shard in state.items()
                if name.startswith(f"{place}.")
            }
        self.step.load(state, self._resumed.scaler)
        self._set_random(state)
        logging.info("resumed after epoch %d, step %d", len(self.history), step)

    def _again(self, record: CheckpointRecord) -> str | None:
        """Return why training restarts despite a checkpoint; None to resume from the checkpoint."""
        end = self._end(record.history)
        if end and record.step > end.step:
            return f"the checkpoint is later than epoch {end.epoch}, which reached the target: training again up to it"
        # A checkpoint of the last step may be from before the last validation, which is then missing in `history`.
        trained = record.step == self.last_step and len(record.history) >= self.last_epoch
        if (end or trained) and record.made_with != self._made_with:
            return (
                "the finished training had another geometry or loader, or other settings of parallel or threads: "
                "training again, to measure times with the new settings"
            )
        return None

    def _obey(self, request: Request, sums: _EpochSums, made_with: dict[str, Any] | None) -> None:
        if not request:
            return
        times = {"seconds": sums.seconds, "wall_time": sums.wall_time, "made_with": made_with}
        untrained = None if self.history else self._with_first_loss(sums)
        if (bad := sums.bad()) and not self.step.skips:  # earlier checkpoints have finite weights
            if request == Request.END:
                raise Stopped(
                    f"asked to end; not saved, because the loss or gradient of step {min(bad) + 1} is NaN or infinite; "
                    "repeat the run to resume from the newest checkpoint"
                )
            return
        self._save(sums.step, sums=sums.by_rank(), bad=bad, untrained=untrained, **times)
        self.checkpoints.wait()  # before the log line, after which this process may be killed
        logging.info("asked to %s: saved after step %d", request.name.lower(), sums.step)
        if request == Request.END:
            self.world.barrier()  # if a rank ended first, ranks that still save would be killed
            raise Stopped(f"asked to end; saved after step {sums.step} of {self.total_steps}; repeat the run to resume")

    def _save(self, step: int, **partial: Any) -> None:
        best = self.best
        if step and self.step.scaler.is_enabled():  # if all gradients overflowed, the optimiser has no state yet
            make_state(self.step.optimizer)
        # Right after the best epoch, the model has the best weights, so these weights are written only once.
        apart = self.best_weights if best and best.step != step else None
        record = CheckpointRecord(
            step=step,
            history=self.history,
            places=self._places,
            scaler=self.step.scaler.state_dict(),
            best=None if best is None else apart is not None,
            **{"made_with": self._made_with, **partial},
        )
        shards = self.step.shards() | {f"best.{name}": shard for name, shard in (apart or {}).items()}
        buffers = {f"{place}.{name}" for place in ("model", "best") for name, _ in self.step.model.named_buffers()}
        self.checkpoints.save(record, own_shards(shards, self.world, buffers) | self._random_states())

    def _wanted(self, record: CheckpointRecord) -> dict[str, Shard]:
        """Return the shards to read from a checkpoint, in new memory, so that a failed read changes nothing."""
        if self._again(record):
            return {}
        if record.step:
            make_state(self.step.optimizer)
        wanted = {
            name: shard
            for name, shard in self.step.shards().items()
            if record.step or not name.startswith("optimizer.")
        }
        if record.best:
            wanted |= {f"best.{name}": shard for name, shard in self.step.weights.shards().items()}
        if record.places == self._places:  # on another mesh or device type, random numbers (drop-out) start anew
            wanted |= self._random_states()
        return {name: shard.empty() for name, shard in wanted.items()}

    def _random_states(self) -> dict[str, Shard]:
        states = {"cpu": torch.get_rng_state()}
        if self.step.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.step.device)
        if self.step.divided and self.step.divided.draws:
            states["divided"] = self.step.divided.random_state
        return {f"random.{kind}.{self.world.rank}": Shard(state) for kind, state in states.items()}

    def _set_random(self, state: Mapping[str, Shard]) -> None:
        for name in self._random_states():
            if name in state:
                kind, value = name.split(".")[1], state[name].tensor
                if kind == "cpu":
                    torch.set_rng_state(value)
                elif kind == "cuda":
                    torch.cuda.set_rng_state(value, self.step.device)
                elif self.step.divided:
                    self.step.divided.random_state = value


class _EpochSums:
    """Sums over an epoch's samples on this rank: the loss and `count - 1` training metrics; and the time of the steps.

    Sums, time and bad steps continue from the checkpoint `before`; `numbers` are the following steps.
    """

    def __init__(self, before: CheckpointRecord, numbers: range, world: World, step: Step, count: int) -> None:
        self.step, self._world, self.numbers, self._model_step = numbers.start, world, numbers, step
        self._before, self._seen = before.bad, torch.zeros(len(numbers), 2, device=step.device)
        sums = before.rank_sums(world.data_rank, world.data_size) or [0.0] * count
        self._sums = torch.tensor(sums, dtype=torch.float64, device=step.device)
        self._start, self.wall_time = time.perf_counter() - before.seconds, before.wall_time
        self._seconds = before.seconds  # valid if `wall_time` is set: after the epoch's steps
        self.first_loss: torch.Tensor | None = None  #: sum of this rank's losses in the training's first step

    def add(self, number: int, batch: Batch, means: torch.Tensor) -> None:
        # All sums stay on the device, so that the host does not wait.
        known = torch.where(self._model_step.bad > 0, 0.0, means) if self._model_step.skips else means
        self._sums.add_(known, alpha=samples_in(batch[0]))
        alone = means[0] if means.dim() else means
        torch.stack((self._model_step.bad, alone), out=self._seen[number - self.numbers.start])
        if number == 0:
            self.first_loss = alone * samples_in(batch[0])
        self.step = number + 1

    @property
    def seconds(self) -> float:
        """Time spent on the epoch's steps in all tries, seconds."""
        return self._seconds if self.wall_time else time.perf_counter() - self._start

    def finish(self) -> None:
        """Stop the clock after the epoch's last step, unless an earlier try did so."""
        if not self.wall_time:
            self._seconds, self.wall_time = self.seconds, time.time()

    def total(self) -> list[float]:
        """Return the sums over all ranks; this rank's sums are unchanged, because they may be saved later."""
        sums: list[float] = self._world.sum(self._sums.clone()).tolist()
        return sums

    def bad(self) -> dict[int, int]:
        """Return the epoch's bad steps so far: 2 if the loss of any rank is not finite, 1 if only an update is not.

        All ranks call this.
        """
        found = {
            number: 1 if math.isfinite(loss) else 2
            for number, (bad, loss) in zip(self.numbers, self._seen.tolist(), strict=True)
            if bad
        }
        every = [self._before, *self._world.gather(found)]
        return {number: max(each.get(number, 0) for each in every) for number in sorted({n for e in every for n in e})}

    def by_rank(self) -> list[list[float]]:
        sums = dict(self._world.gather((self._world.data_rank, self._sums.tolist())))
        return [sums[rank] for rank in sorted(sums)]


# ---- learning rate ----------------------------------------------------------------------------------


def peak_rate(schedule: Schedule, lr: float, batch_size: int) -> float:
    """Return the learning rate after warm-up.

    The rate is `lr` times a factor: the batch size divided by the base batch size, the square root of this ratio, or 1.
    """
    if schedule.scaling == "none":
        return lr
    assert schedule.base_batch_size is not None
    ratio = batch_size / schedule.base_batch_size
    return lr * (ratio if schedule.scaling == "linear" else math.sqrt(ratio))


def learning_rate(schedule: Schedule, peak: float, step: int, total: int, steps_per_epoch: int) -> float:
    """Return the learning rate of optimiser step `step` (0-based) of `total`.

    After a linear warm-up to `peak`, the rate depends on the kind of schedule:

    - `constant`: the rate is `peak`.
    - `step`: the rate is multiplied by `gamma` after every `step_epochs` epochs, or at the epochs in `milestones`.
    - `exponential`: after the warm-up, the rate is multiplied by `gamma` ** (1 / steps per epoch) at each step.
    - `cosine`, `linear`, `polynomial`: the rate falls from `peak` to `end_lr` at step == total, as half a cosine, as a
      line, or as the square of the fraction of steps left.
    """
    warmup = min(schedule.warmup_steps or schedule.warmup_epochs * steps_per_epoch, total)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.kind == "constant":
        return peak
    if schedule.kind == "step":
        epoch = step // steps_per_epoch
        milestones = schedule.milestones
        return float(
            peak * schedule.gamma ** (bisect(milestones, epoch) if milestones else epoch // schedule.step_epochs)
        )
    if schedule.kind == "exponential":
        return float(peak * schedule.gamma ** ((step - warmup) / steps_per_epoch))
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    if schedule.kind == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        share = (1.0 - progress) ** (2.0 if schedule.kind == "polynomial" else 1.0)
    return schedule.end_lr + (peak - schedule.end_lr) * share
