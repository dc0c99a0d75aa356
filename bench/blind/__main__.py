"""Compare the predictions of the blind test, and of other public runs, with the published figures.

`python -m bench.blind` prints the table of docs/planning.md. `python -m bench.blind ratios` writes the ratios that
`dlscale predict --model` uses as its range. Commit fc0328d0 has the code that made `predictions.yaml`.
"""

from __future__ import annotations

import statistics
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dlscale.extensions.predict.analytic import PUBLIC_RUNS, Model, fitted
from dlscale.extensions.predict.model import Job

HERE = Path(__file__).parent
#: Fraction of a block's FLOPs that selective recomputation repeats: torchtitan repeats every second matrix product.
SELECTIVE = 0.5
#: Table to which `reached` in `machines.yaml` was fitted after the blind test.
FITTED = "llm-foundry"
#: Fraction of the peak that products reach on all devices of the blind test: dlscale's measurement on an H200.
REACHED = 0.79


def configurations() -> dict[str, Any]:
    """Return the content of `configurations.yaml`."""
    found: dict[str, Any] = yaml.safe_load((HERE / "configurations.yaml").read_text())
    return found


def model_of(run: dict[str, Any], every: dict[str, Any], reached: float | None = REACHED) -> Model:
    """Return the description of a run's model: parameters, FLOPs and shapes, for `dlscale predict --model`."""
    shape, device = every["models"][run["model"]], {**every["devices"][run["device"]], "reached": reached}
    blocks, width, vocabulary, count = shape["blocks"], shape["width"], shape["vocabulary"], run["tokens"]
    products = width * width * (2 + 2 * shape.get("heads", 1)) + shape["matrices"] * width * shape["inner"]
    embedding = vocabulary * width
    # Forward pass of a sample: products of the blocks, attention (half of the pairs, since it is causal), logits.
    linear, attention, logits = 2 * count * products * blocks, 2 * count**2 * width * blocks, 2 * count * embedding
    attention *= 1 if shape.get("causal", True) else 2
    repeated = {"full": 1.0, "selective": SELECTIVE}.get(run.get("recompute", ""), 0.0)
    again = repeated * linear + (attention if repeated == 1 else 0.0)
    format_ = "fp8" if run.get("fp8") else "bf16"
    flops = {
        "bf16": 3 * logits + 3.5 * attention + (attention if repeated == 1 else 0.0)
    }  # FlashAttention's backward pass has 5 products
    flops[format_] = flops.get(format_, 0.0) + 3 * linear + again - (attention if repeated == 1 else 0.0)
    fsdp = run.get("strategy", "fsdp") == "fsdp"
    ranks = run["gpus"] // (run.get("tp", 1) * run.get("cp", 1))
    return Model(
        name=run["model"],
        machine=device.pop("machine"),
        device=device,
        parameters=products * blocks + embedding * (1 if shape.get("tied") else 2),
        flops=flops,
        tokens=(count, width, blocks),
        vocabulary=vocabulary,
        batch=run["batch"],
        recomputed={"full": 1.0, "selective": 0.9}.get(run.get("recompute", ""), 0.0),
        fused=run.get("fused", 1.0),
        gradient_bytes=2 if run.get("reduce") == "bf16" else 4,
        gathered_bytes=(2, 0 if run.get("keep") else 2) if fsdp else None,
        shards=ranks,
        steps=run.get("accumulate", 1),
    )


def predict(run: dict[str, Any], every: dict[str, Any], reached: float | None = REACHED) -> float:
    """Return the predicted tokens/s per GPU."""
    model = model_of(run, every, reached)
    found = fitted(model).rate(Job(run["gpus"], run["batch"], run.get("tp", 1), run.get("cp", 1)))
    return round(float(found.value) * run["tokens"] / run["gpus"], 1)


def _read(file: str) -> Any:
    return yaml.safe_load((HERE / file).read_text())["tokens_per_second_per_gpu"]


def ratios() -> dict[str, list[float]]:
    """Return the ratios measured / predicted of all public runs by table, with `reached` from `machines.yaml`."""
    every, found = configurations(), dict[str, list[float]]()
    pairs = list(zip(every["runs"], _read("measured.yaml"), strict=True))
    pairs += [(run, rate * run["tokens"] / run["gpus"]) for run in every["others"] for rate in run["published"]]
    for run, measured in pairs:
        found.setdefault(run["table"], []).append(round(measured / predict(run, every, None), 3))
    return found


def table() -> Iterator[str]:
    """Yield the lines of the table of errors, in Markdown; each error is predicted / measured - 1."""
    every = configurations()
    runs, predicted, measured = every["runs"], _read("predictions.yaml"), _read("measured.yaml")
    errors = [value / found - 1 for (value, *_), found in zip(predicted, measured, strict=True)]
    cells, sizes = dict[tuple[str, ...], list[str]](), dict[str, list[tuple[int, float]]]()
    for run, error in zip(runs, errors, strict=True):
        split = "".join(f", {axis} {run[axis]}" for axis in ("tp", "cp") if axis in run)
        key = run["table"], run["model"], f"{run['tokens']:,}", run["device"], run.get("id", "")
        cells.setdefault(key, []).append(f"{run['gpus']}{split}: {_percent(error)}")
        same = {name: value for name, value in run.items() if name not in ("gpus", "id")}
        sizes.setdefault(str(same), []).append((run["gpus"], error))
    yield "| table | model | tokens | device | row | GPUs: error |"
    yield "|---|---|---|---|---|---|"
    yield from (f"| {' | '.join(row)} | {'; '.join(cell)} |" for row, cell in cells.items())
    yield ""
    for group in dict.fromkeys((run["table"], run["device"]) for run in runs):
        own = [error for run, error in zip(runs, errors, strict=True) if (run["table"], run["device"]) == group]
        yield f"- {', '.join(group)}: {_spread(own)}"
    ends = [(min(each)[1], max(each)[1]) for each in sizes.values() if len(each) > 1]
    yield f"- scaling from the fewest to the most GPUs: {_spread([(1 + most) / (1 + few) - 1 for few, most in ends])}"
    inside = sum(low <= found <= high for (_, low, high), found in zip(predicted, measured, strict=True))
    yield f"- published figures within the 90 % band: {inside} of {len(measured)}"
    yield ""
    yield f"With `reached` from `machines.yaml`, which is fitted to {FITTED} up to 8,192 tokens, on the other tables:"
    yield ""
    tables = ratios()
    yield f"- {_spread([1 / each - 1 for name in ('torchtitan', 'nemo') for each in tables[name]])}"
    yield ""
    rows = sorted(each for own in tables.values() for each in own)
    low, high = f"{rows[0]:.2f}", f"{rows[-1]:.2f}"
    yield f"The printed range, {low} to {high} times the rate, covers {len(rows)} public runs: these tables and"
    yield "the ViT in 16 bits (SC23 to SC25). Measured / predicted, and figures within the other tables' range:"
    yield ""
    for name, own in tables.items():
        rest = [each for other, values in tables.items() if other != name for each in values]
        inside = sum(min(rest) <= each <= max(rest) for each in own)
        yield f"- {name}: {min(own):.2f} to {max(own):.2f}; {inside} of {len(own)}"
    inside = sum(min(rest) <= each <= max(rest) for n, each in enumerate(rows) for rest in [rows[:n] + rows[n + 1 :]])
    yield f"- all: {inside} of {len(rows)} within the range of all other figures"


def _percent(error: float) -> str:
    return f"{100 * error:+.0f} %".replace("-", "−")


def _spread(errors: list[float]) -> str:
    middle = statistics.median(map(abs, errors))
    return f"{len(errors)} figures, median {100 * middle:.0f} %, {_percent(min(errors))} to {_percent(max(errors))}"


def main() -> None:
    """With the argument `ratios`, write the ratios of public runs; otherwise print the table of errors."""
    if sys.argv[1:] != ["ratios"]:
        print("\n".join(table()))
        return
    lines = ["# Ratios measured / predicted of public runs that were predicted without a measurement, by table, in the"]
    lines += ["# order of bench/blind/configurations.yaml. `python -m bench.blind ratios` writes this file."]
    for name, own in ratios().items():
        lines += [
            f"{name}:",
            *textwrap.wrap(f"[{', '.join(map(str, own))}]", 116, initial_indent="  ", subsequent_indent="   "),
        ]
    PUBLIC_RUNS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
