"""Extension: the trackers Weights & Biases and MLflow, by their names in `training.trackers`."""

TRACKERS = {
    "wandb": "dlscale.extensions.trackers.trackers.Wandb",
    "mlflow": "dlscale.extensions.trackers.trackers.Mlflow",
}
