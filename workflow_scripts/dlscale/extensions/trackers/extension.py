"""Trackers of this extension, by their names in `training.trackers`: Weights & Biases and MLflow."""

TRACKERS = {
    "wandb": "dlscale.extensions.trackers.trackers.Wandb",
    "mlflow": "dlscale.extensions.trackers.trackers.Mlflow",
}
