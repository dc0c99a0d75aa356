"""Log runs to Weights & Biases and MLflow: optional dependencies, which are imported if a run uses them.

A tracker that cannot be used raises `UserError` at the start of a training. Later, a failure to log to MLflow only
causes a warning, and the training continues.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dlscale.core.errors import UserError, brief
from dlscale.core.files import read_text, write_text
from dlscale.core.metrics import Best, Epoch, Untrained
from dlscale.core.process import turn
from dlscale.core.settings import flat
from dlscale.core.urls import hidden_in
from dlscale.train.logs import quantities, validation


@contextlib.contextmanager
def _needed(name: str) -> Iterator[None]:
    """Turn an `ImportError` of the tracker `name` into a `UserError`."""
    try:
        yield
    except ImportError:
        raise UserError(
            f"training.trackers: {name} is not installed. Run pip install 'dlscale[trackers]', or remove this "
            "tracker from the list"
        ) from None


#: Settings that stop Weights & Biases from collecting data about the machine.
UNSEEN: Any = {**dict.fromkeys(("x_disable_meta", "x_disable_stats", "x_disable_machine_info"), True), "host": ""}


class Wandb:
    """Log to Weights & Biases, in the folder `wandb/` of the run; offline unless WANDB_MODE is set.

    Only settings, numbers and a picture of a prediction are logged; no output, code, host, or environment. Epochs of an
    earlier try are logged again.
    """

    def __init__(self, out: Path, run: dict[str, Any], history: Iterable[Epoch], kept: Path) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # error reports would go online in any mode
        with _needed("wandb"):
            import wandb
        wandb.finish()  # ends a W&B run that a failed training in this process left open
        shutil.rmtree(out / "wandb", ignore_errors=True)  # removes files of an earlier try
        out.mkdir(parents=True, exist_ok=True)
        mode: Any = os.environ.get("WANDB_MODE", "offline")  # wandb checks the value
        self._wandb = wandb
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "dlscale"),
                group=os.environ.get("WANDB_RUN_GROUP", out.parent.name),
                name=f"{out.parent.name}.{out.name}",
                dir=str(out),
                mode=mode,
                config=run,
                settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, **UNSEEN),
            )
        except Exception as error:  # wandb raises many types of errors, also of pydantic
            raise UserError(
                f"training.trackers: wandb: {brief(error)}. Check WANDB_MODE; online needs a network and "
                "WANDB_API_KEY. Or remove wandb from the list"
            ) from error
        for record in history:
            self.add(record)

    def add(self, record: Epoch) -> None:
        if record.untrained:
            self._log(0, record.untrained)
        self._log(record.step, record)

    def _log(self, step: int, record: Epoch | Untrained) -> None:
        numbers = record.model_dump(exclude={"metrics", "train_metrics", "made_with", "untrained"})
        numbers |= {f"valid/{name}": value for name, value in record.metrics.items()}
        numbers |= {f"train/{name}": value for name, value in getattr(record, "train_metrics", {}).items()}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        self._run.log(finite, step=step)

    def finish(self, picture: Path, best: Best | None) -> None:
        """Log the picture of a prediction and the best value, and close the run."""
        self._run.log({"valid/prediction": self._wandb.Image(str(picture))})
        if best:
            self._run.summary.update({"best": best.model_dump()})
        self._run.finish()
        self._wandb.teardown()  # waits for wandb's service, which still writes after a run's end


def _known(name: str) -> str:
    """Replace the characters of a name that MLflow rejects.

    MLflow rejects all numbers of a request if one name is invalid.
    """
    return re.sub(r"[^\w.\- :/]", "_", name)


class Mlflow:
    """Log to MLflow, at MLFLOW_TRACKING_URI, or in `mlflow.db` in the plan's folder.

    Only settings and numbers are logged; numbers have the same tags as in TensorBoard. A resumed training continues the
    MLflow run of the earlier try, whose id is in the file `mlflow` in the folder `kept`. Steps that the MLflow run
    already has are not logged again.
    """

    def __init__(self, out: Path, run: dict[str, Any], history: Iterable[Epoch], kept: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # MLflow's telemetry would use the network
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the default waits minutes for a lost server
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")  # seconds
        with _needed("mlflow"):
            import mlflow
        self._mlflow: Any = mlflow
        self._id_file, self._waiting, self._lost, self._last = kept / "mlflow", list[Any](), False, (0, 0.0)
        out.parent.mkdir(parents=True, exist_ok=True)
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(out.parent / 'mlflow.db').absolute()}"
        try:
            with turn(out.parent / ".mlflow.lock"):  # two runs cannot create a database's tables at the same time
                self._client = self._mlflow.MlflowClient(tracking_uri=address)
                self._run = self._same_run() or self._new_run(out, run)
            logged = self._client.get_metric_history(self._run, "loss/valid")
        except Exception as error:  # MLflow, SQLAlchemy or the store's client package may raise any type
            raise UserError(
                f"training.trackers: mlflow: {hidden_in(brief(error))}. The server or database of MLFLOW_TRACKING_URI "
                "must exist. Start or create it, or remove mlflow from the list"
            ) from None
        self._logged = {metric.step for metric in logged}
        for record in history:
            self.add(record)

    def _same_run(self) -> str | None:
        """Return the id of the earlier try's MLflow run; None if there is no earlier try, or if the run was deleted."""
        if not self._id_file.exists():
            return None
        found = read_text(self._id_file)
        try:
            self._client.update_run(found, status="RUNNING")
        except self._mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return found

    def _new_run(self, out: Path, run: dict[str, Any]) -> str:
        name, entities = os.environ.get("MLFLOW_EXPERIMENT_NAME") or out.parent.name, self._mlflow.entities
        with contextlib.suppress(self._mlflow.MlflowException):  # the experiment may already exist
            self._client.create_experiment(name)
        experiment = self._client.get_experiment_by_name(name).experiment_id
        found: str = self._client.create_run(experiment, run_name=f"{out.parent.name}.{out.name}").info.run_id
        params = [entities.Param(_known(key), str(value)) for key, value in flat(run).items()]
        self._client.log_batch(found, params=params)
        write_text(self._id_file, found)
        return found

    def add(self, record: Epoch) -> None:
        if record.untrained and 0 not in self._logged:
            scores = {"loss/train": record.untrained.train_loss, **validation(record.untrained)}
            self._add(scores, 0, record.begin)
        if record.step not in self._logged:
            self._add(quantities(record, record.step - self._last[0]), record.step, record.wall_time)
        self._last = record.step, record.wall_time
        if not self._lost:
            self._send()

    def _add(self, numbers: dict[str, float], step: int, wall_time: float) -> None:
        time = round(1000 * wall_time)
        metric = self._mlflow.entities.Metric
        self._waiting += [metric(_known(name), value, time, step) for name, value in numbers.items()]

    def _send(self, ended: bool = False) -> None:
        """Log the queued metrics, and mark the MLflow run as `ended`; warn if this fails.

        After a failure, later metrics stay in the queue until the end of the training, so that epochs are not delayed.
        """
        try:
            self._client.log_batch(self._run, metrics=self._waiting)
            self._waiting = []
            if ended:
                self._client.set_terminated(self._run)
        except Exception as error:
            self._lost = True
            logging.warning(
                f"training.trackers: mlflow: {hidden_in(brief(error))}. MLflow may lack results; dlscale's are complete"
            )

    def finish(self, picture: Path, best: Best | None) -> None:
        """Log the best value and queued metrics; if that succeeds, mark the MLflow run as ended."""
        if best:
            self._add({f"best/{best.metric}": best.value}, best.step, self._last[1])
        self._send(ended=True)
