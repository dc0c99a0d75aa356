"""Prediction of the memory of a step, and settings that need less."""

PROVIDES = {
    "predict_memory": "dlscale.extensions.memory.prediction.predict",
    "memory_advice": "dlscale.extensions.memory.prediction.advice",
}
