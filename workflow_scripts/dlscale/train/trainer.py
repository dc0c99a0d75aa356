"""Training epoch by epoch, the same for every study: validation, records, checkpoints."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dlscale.config.run import Run
from dlscale.core.errors import Stopped, UserError
from dlscale.core.progress import Progress
from dlscale.core.records import Epoch
from dlscale.data.loaders.base import Loader, Share
from dlscale.models.metrics import MetricSum
from dlscale.parallel.world import World
from dlscale.studies.base import Metrics
from dlscale.train.checkpoint import CheckpointRecord, Checkpoints, PartialEpoch
from dlscale.train.interruption import Interruption
from dlscale.train.loop import Batch, Hook, run_steps
from dlscale.train.schedule import learning_rate, peak_rate
from dlscale.train.step import Step


class Trainer:
    """Trains, validates after every epoch, and saves checkpoints: at the ends of epochs, and when a signal asks for it.

    Every rank does the same; the first one saves.

    Parameters
    ----------
    run
        The settings that the train stage sees.
    share
        What this rank loads of each batch.
    metrics
        Validation metrics.
    checkpoints
        Where to save and resume.

    Attributes
    ----------
    total_steps, epochs
        Of the whole training; the last epoch may be cut short.
    history
        The epochs that are done.
    resumed_from
        Step of the checkpoint from which this process went on; None if it began anew.
    """

    def __init__(
        self,
        run: Run,
        step: Step,
        share: Share,
        train_loader: Loader,
        valid_loader: Loader,
        metrics: Metrics,
        checkpoints: Checkpoints,
        world: World,
    ) -> None:
        self.run, self.step, self.share, self.metrics, self.world = run, step, share, metrics, world
        self.train_loader, self.valid_loader, self.checkpoints = train_loader, valid_loader, checkpoints
        self.total_steps = run.training.steps or len(train_loader) * (run.training.epochs or 0)
        self.epochs = -(-self.total_steps // len(train_loader))
        self.history: list[Epoch] = []
        self.resumed_from: int | None = None
        self._partial = PartialEpoch()  # of the epoch in which an earlier try was stopped

    def rate(self, number: int) -> float:
        """Return the learning rate of step `number`."""
        peak = peak_rate(self.run.schedule, self.run.optimizer.lr, self.run.batch_size)
        return learning_rate(self.run.schedule, peak, number, self.total_steps, len(self.train_loader))

    def fit(self, on_epoch: Callable[[Epoch], None] = lambda record: None) -> list[Epoch]:
        """Train to the end; return the record of each epoch, to which `on_epoch` is told as it comes."""
        with Interruption(self.world) as interruption, Progress("training", self.total_steps, "steps") as progress:
            hooks = [_LearningRate(self), _Display(progress)]
            for epoch in range(len(self.history), self.epochs):
                record = self._epoch(epoch, interruption, hooks)
                logging.info(
                    "epoch %d of %d: %.1f s, %.2f samples/s, train loss %.6f, valid loss %.6f (%.1f s)%s",
                    record.epoch,
                    self.epochs,
                    record.epoch_seconds,
                    record.samples_per_second,
                    record.train_loss,
                    record.valid_loss,
                    record.valid_seconds,
                    "".join(f", {name} {value:.4g}" for name, value in record.metrics.items() if "skill" in name),
                )
                on_epoch(record)
                self.history.append(record)
                if epoch + 1 == self.epochs or (epoch + 1) % self.run.training.checkpoint_epochs == 0:
                    self.save()
        return self.history

    def _epoch(self, epoch: int, interruption: Interruption, hooks: Sequence[Hook]) -> Epoch:
        done, seen = (self.history[-1].step, self.history[-1].samples) if self.history else (0, 0)
        steps = min(len(self.train_loader), self.total_steps - done)
        samples = min(steps * self.run.batch_size, self.train_loader.samples)
        before, self._partial = self._partial, PartialEpoch()
        sums = _EpochSums(before, self.world, self.step.device)
        requests = _Requests(interruption, self, sums)
        batches = self.train_loader.epoch(epoch, before.steps)
        numbers = range(done + before.steps, done + steps)
        run_steps(self.step, self._weighted(batches, before.steps), numbers, [requests, *hooks, sums])
        requests.before_step(done + steps)
        train_loss = sums.total() / samples  # waits, so the time below is that of finished work
        wall_time, seconds = time.time(), sums.seconds
        batches.close()
        _check_finite(epoch, "training", train_loss)
        start = time.perf_counter()
        valid_loss, metrics = self.validate([requests])
        _check_finite(epoch, "validation", valid_loss)  # the training loss knows nothing of the last update
        return Epoch(
            epoch=epoch + 1,
            step=done + steps,
            samples=seen + samples,
            learning_rate=self.rate(done + steps - 1),
            train_loss=train_loss,
            valid_loss=valid_loss,
            epoch_seconds=seconds,
            samples_per_second=samples / seconds,
            valid_seconds=time.perf_counter() - start,
            wall_time=wall_time,
            metrics=metrics,
        )

    def _weighted(self, batches: Iterator[Batch], first: int) -> Iterator[Batch]:
        """Yield batches with the weight of this rank's loss, from step `first` of an epoch."""
        for number, (x, y) in enumerate(batches, first):
            yield x, y, self.share.weight(number, self.train_loader.samples)

    def validate(self, hooks: Sequence[Hook] = ()) -> tuple[float, dict[str, float]]:
        """Return the loss and the metrics over all validation samples, each counted once."""
        sums = MetricSum()

        def add(x: torch.Tensor, y: torch.Tensor) -> None:
            prediction = self.step.predict(x)
            losses = {"valid_loss": self.step.loss(prediction, y)}
            sums.add(losses | self.metrics.per_sample(x, y, prediction))

        run_steps(add, self.valid_loader.epoch(0), range(len(self.valid_loader)), hooks)
        means = sums.means(self.world.sum)
        loss = float(means.pop("valid_loss"))
        return loss, self.metrics.summarise(means)

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one: the first rank chooses it, and all read the same."""
        loaded = self.checkpoints.load() if self.world.main else None
        step = self.world.gather(loaded[0].step if loaded else None)[0]
        if step is None:
            return
        loaded = loaded or self.checkpoints.load(step)
        lost = self.world.gather(loaded is None).count(True)
        if loaded is None or lost:
            raise UserError(
                f"{self.checkpoints.folder}: the checkpoint of step {step} cannot be read by {lost} of "
                f"{self.world.size} processes; all nodes need the same file system"
            )
        record, state = loaded
        self.step.load_state_dict(state)
        if len(state["rng"]) == self.world.size:  # with another number of ranks drop-out starts anew
            torch.set_rng_state(state["rng"][self.world.rank])
            cuda = state["cuda_rng"][self.world.rank]
            if self.step.device.type == "cuda" and cuda is not None:
                torch.cuda.set_rng_state(cuda, self.step.device)
        self.history, self._partial = list(record.history), record.partial or PartialEpoch()
        self.resumed_from = step
        logging.info("resumed after epoch %d, step %d", len(self.history), step)

    def save(self, partial: PartialEpoch | None = None) -> int:
        """Save a checkpoint, with an epoch that is not done; return its step."""
        step = (self.history[-1].step if self.history else 0) + (partial.steps if partial else 0)
        cuda = torch.cuda.get_rng_state(self.step.device) if self.step.device.type == "cuda" else None
        rng = {"rng": self.world.gather(torch.get_rng_state()), "cuda_rng": self.world.gather(cuda)}
        if self.world.main:
            record = CheckpointRecord(step=step, history=self.history, partial=partial)
            self.checkpoints.save(record, {**self.step.state_dict(), **rng})
        return step


class _Requests(Hook):
    """Saves, or saves and ends, before the next step when a signal asks for it."""

    def __init__(self, interruption: Interruption, trainer: Trainer, sums: _EpochSums) -> None:
        self._interruption, self._trainer, self._sums = interruption, trainer, sums

    def before_step(self, number: int) -> None:
        if request := self._interruption.poll():
            step = self._trainer.save(self._sums.partial())
            logging.info("asked to %s: saved after step %d", request, step)
            if request == "end":
                self._trainer.world.barrier()  # a rank that ends before the others have saved ends them, too
                raise Stopped(f"asked to end; saved after step {step} of {self._trainer.total_steps}; run it again")


class _LearningRate(Hook):
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def before_step(self, number: int) -> None:
        self._trainer.step.set_learning_rate(self._trainer.rate(number))


class _Display(Hook):
    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def after_step(self, number: int, batch: Batch, result: Any) -> None:
        self._progress.update(number + 1)


class _EpochSums(Hook):
    """Steps, losses and time of the epoch under way, on this rank."""

    def __init__(self, before: PartialEpoch, world: World, device: torch.device) -> None:
        self.steps, self._world = before.steps, world
        loss_sum = before.loss_sum(world.rank, world.size)
        self._loss_sum = torch.tensor(loss_sum, dtype=torch.float64, device=device)
        self._start = time.perf_counter() - before.seconds

    def after_step(self, number: int, batch: Batch, result: Any) -> None:
        self._loss_sum += result * len(batch[0])  # stays on the device: no step waits
        self.steps += 1

    @property
    def seconds(self) -> float:
        """Time since the epoch began, without that between two tries."""
        return time.perf_counter() - self._start

    def total(self) -> float:
        """Return the sum of all ranks' losses. Of a copy: this rank's own sum may yet be saved."""
        return float(self._world.sum(self._loss_sum.clone()))

    def partial(self) -> PartialEpoch:
        """Return what a checkpoint holds of the epoch."""
        sums = self._world.gather(float(self._loss_sum))
        return PartialEpoch(steps=self.steps, loss_sums=sums, seconds=self.seconds)


def _check_finite(epoch: int, what: str, loss: float) -> None:
    if not math.isfinite(loss):
        raise UserError(
            f"epoch {epoch + 1}: the {what} loss is {loss}; lower optimizer.lr, add schedule.warmup_steps, "
            "use precision bf16 or fp32, or look for bad values in the data. Checkpoints of earlier epochs are kept"
        )
