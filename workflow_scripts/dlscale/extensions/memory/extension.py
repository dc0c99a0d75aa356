"""Extension: prediction of a step's memory, and of settings that need less."""

PROVIDES = {
    "predict_memory": "dlscale.extensions.memory.prediction.predict",
    "memory_advice": "dlscale.extensions.memory.prediction.advice",
}
