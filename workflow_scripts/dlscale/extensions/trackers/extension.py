"""What this extension adds: Weights & Biases and MLflow, by the names that `training.trackers` gives them."""

TRACKERS = {
    "wandb": "dlscale.extensions.trackers.trackers.Wandb",
    "mlflow": "dlscale.extensions.trackers.trackers.Mlflow",
}
