"""The training loop, the same for every study."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from dlscale.config.run import Run
from dlscale.core.errors import Stopped, UserError
from dlscale.core.progress import Progress
from dlscale.data.loaders.base import Loader
from dlscale.models.metrics import MetricSum
from dlscale.parallel.world import World
from dlscale.studies.base import Metrics
from dlscale.train.checkpoint import Checkpoints, State
from dlscale.train.interruption import Interruption
from dlscale.train.schedule import learning_rate, peak_rate
from dlscale.train.step import Loss, Step

Record = dict[str, Any]


@dataclass(frozen=True)
class Partial:
    """How far an epoch was when it was stopped.

    Attributes
    ----------
    steps, samples
        Done in it.
    loss_sums
        Sum of the samples' losses, of each process.
    learning_rate
        Of its last step.
    seconds
        Spent on it, in all tries.
    """

    steps: int
    samples: int
    loss_sums: list[float]
    learning_rate: float
    seconds: float

    @classmethod
    def none(cls, processes: int) -> Partial:
        """Return that of an epoch that has not begun."""
        return cls(0, 0, [0.0] * processes, 0.0, 0.0)

    def among(self, processes: int) -> Partial:
        """Return the same for another number of processes."""
        if len(self.loss_sums) == processes:
            return self
        return replace(self, loss_sums=[sum(self.loss_sums), *[0.0] * (processes - 1)])


@dataclass
class Trainer:
    """Trains, validates after every epoch, and saves checkpoints: at the ends of epochs, and whenever it is asked to.

    Attributes
    ----------
    run
        The settings.
    step
        One optimiser step.
    loss
        The loss, also that of validation.
    loaders
        Training and validation batches.
    metrics
        Validation metrics.
    checkpoints
        Where to save and resume.
    on_epoch
        Called with each epoch's record; on a resume first with those of the epochs done before.
    world
        The processes that train together; all of them do what is said here, and the first one saves.
    """

    run: Run
    step: Step
    loss: Loss
    train_loader: Loader
    valid_loader: Loader
    metrics: Metrics
    checkpoints: Checkpoints
    on_epoch: Callable[[Record], None]
    world: World = field(default_factory=World)

    def __post_init__(self) -> None:
        per_epoch = len(self.train_loader)
        training = self.run.training
        self.total_steps = training.steps or per_epoch * (training.epochs or 0)
        self.epochs = -(-self.total_steps // per_epoch)
        self.peak = peak_rate(self.run.schedule, self.run.optimizer.lr, self.run.batch_size)
        self.history: list[Record] = []
        self.resumed_from: int | None = None
        self._partial: Partial | None = None  # of the epoch in which an earlier try was stopped

    def fit(self) -> list[Record]:
        """Train to the end, from the newest checkpoint if there is one; return a record for each epoch.

        A record holds `epoch` (from 1), `step` and `samples` (totals so far), `learning_rate` (of the epoch's
        last step), `train_loss` (mean over the epoch's samples), `valid_loss`, `epoch_seconds` and
        `samples_per_second` (training alone, the wait for the first batch included), `valid_seconds`, and
        `metrics` by name.
        """
        self._resume()
        for record in self.history:
            self.on_epoch(record)
        with Interruption(self.world) as interruption, Progress("training", self.total_steps, "steps") as progress:
            for epoch in range(len(self.history), self.epochs):
                record = self._epoch(epoch, progress, interruption)
                self.history.append(record)
                logging.info(
                    "epoch %d of %d: %.1f s, %.2f samples/s, train loss %.6f, valid loss %.6f (%.1f s)%s",
                    record["epoch"],
                    self.epochs,
                    record["epoch_seconds"],
                    record["samples_per_second"],
                    record["train_loss"],
                    record["valid_loss"],
                    record["valid_seconds"],
                    "".join(f", {name} {value:.4g}" for name, value in record["metrics"].items() if "skill" in name),
                )
                last = epoch + 1 == self.epochs
                if last or (epoch + 1) % self.run.training.checkpoint_epochs == 0:
                    self._save(record["step"], None)
                self.on_epoch(record)
        return self.history

    def _epoch(self, epoch: int, progress: Progress, interruption: Interruption) -> Record:
        device = self.step.device
        done = self.history[-1]["step"] if self.history else 0
        seen = self.history[-1]["samples"] if self.history else 0
        steps = min(len(self.train_loader), self.total_steps - done)
        size = self.train_loader.samples
        before, self._partial = self._partial or Partial.none(self.world.size), None
        loss_sum = torch.tensor(before.loss_sums[self.world.rank], dtype=torch.float64, device=device)
        samples, rate, first = before.samples, before.learning_rate, before.steps
        start = time.perf_counter() - before.seconds

        def heed(number: int) -> None:
            """Save before step `number` of the epoch, or before its validation, if that is asked for."""
            if request := interruption.asked():
                seconds = time.perf_counter() - start
                sums = self.world.gather(float(loss_sum))
                self._save(done + number, Partial(number, samples, sums, rate, seconds))
                logging.info("asked to %s: saved after step %d", request, done + number)
                if request == "end":
                    self.world.wait()  # whoever ended first would have the others ended, too
                    raise Stopped(f"asked to end; saved after step {done + number} of {self.total_steps}; run it again")

        batches = self.train_loader.epoch(epoch, first)
        for number in range(first, steps):
            heed(number)
            x, y = next(batches)
            rate = learning_rate(self.run.schedule, self.peak, done + number, self.total_steps)
            self.step.set_learning_rate(rate)
            whole = min(self.run.batch_size, size - number * self.run.batch_size)
            loss = self.step(x, y, weight=len(x) * self.world.size / whole)
            loss_sum += loss * len(x)  # stays on the device: no step waits
            samples += whole
            progress.update(done + number + 1)
        heed(steps)
        # This waits, so the time below is that of finished work. Of a copy: this process's own sum may yet be saved.
        train_loss = float(self.world.sum(loss_sum.clone())) / samples
        seconds = time.perf_counter() - start
        batches.close()
        _check_finite(epoch, "training", train_loss)
        start = time.perf_counter()
        valid = self.validate(lambda: heed(steps))
        _check_finite(epoch, "validation", valid["loss"])  # the training loss knows nothing of the last update
        return {
            "epoch": epoch + 1,
            "step": done + steps,
            "samples": seen + samples,
            "learning_rate": rate,
            "train_loss": train_loss,
            "valid_loss": valid.pop("loss"),
            "epoch_seconds": seconds,
            "samples_per_second": samples / seconds,
            "valid_seconds": time.perf_counter() - start,
            "metrics": valid,
        }

    def validate(self, heed: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Return the loss (`loss`) and the metrics over all validation samples, each counted once.

        `heed` is called before each batch, and may stop it.
        """
        sums = MetricSum()
        for x, y in self.valid_loader.epoch(0):
            heed()
            prediction = self.step.predict(x)
            losses = self.loss(prediction, y)
            sums.add(
                {
                    "loss": losses,
                    **self.metrics.per_sample(x, y, prediction),
                }
            )
        means = sums.means(self.world.sum)
        loss = float(means.pop("loss"))
        return {"loss": loss, **self.metrics.summarise(means)}

    def _resume(self) -> None:
        """Go on from the newest checkpoint: the first process finds it, and all take the same."""
        state = self.checkpoints.load() if self.world.main else None
        step = self.world.gather(state["step"] if state else None)[0]
        if step is not None and state is None:
            state = self.checkpoints.load(step)
        if step is not None and (lost := self.world.gather(state is None)).count(True):
            raise UserError(
                f"{self.checkpoints.folder}: the checkpoint of step {step} cannot be read by {lost.count(True)} of "
                f"{self.world.size} processes; all nodes need the same file system"
            )
        if state is not None:
            self._restore(state)

    def _save(self, step: int, partial: Partial | None) -> None:
        """Save what there is after `step` steps; `partial` where that is in the midst of an epoch."""
        state = self._state(step, partial)
        if self.world.main:
            self.checkpoints.save(step, state)

    def _state(self, step: int, partial: Partial | None) -> State:
        return {
            **self.step.state_dict(),
            "step": step,
            "partial": asdict(partial) if partial else None,
            "history": self.history,
            "rng": self.world.gather(torch.get_rng_state()),
            "cuda_rng": self.world.gather(
                torch.cuda.get_rng_state(self.step.device) if self.step.device.type == "cuda" else None
            ),
        }

    def _restore(self, state: State) -> None:
        self.step.load_state_dict(state)
        self.history = state["history"]
        if len(state["rng"]) == self.world.size:  # with another number of processes drop-out starts anew
            torch.set_rng_state(state["rng"][self.world.rank].cpu())
            cuda = state["cuda_rng"][self.world.rank]
            if self.step.device.type == "cuda" and cuda is not None:
                torch.cuda.set_rng_state(cuda.cpu(), self.step.device)
        if state["partial"]:
            self._partial = Partial(**state["partial"]).among(self.world.size)
        self.resumed_from = state["step"]
        logging.info("resumed after epoch %d, step %d", len(self.history), state["step"])


def _check_finite(epoch: int, what: str, loss: float) -> None:
    if not math.isfinite(loss):
        raise UserError(
            f"epoch {epoch + 1}: the {what} loss is {loss}; lower optimizer.lr, add schedule.warmup_steps, "
            "use precision bf16 or fp32, or look for bad values in the data. Checkpoints of earlier epochs are kept"
        )
