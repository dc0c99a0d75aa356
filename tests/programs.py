"""A small external program for tests. It has PyTorch's optimiser hooks but uses neither PyTorch nor dlscale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: Module that replaces the PyTorch module imported by the program, so the program starts at once, and its container
#: needs no PyTorch.
OPTIMIZER = """
HOOKS = []
def register_optimizer_step_post_hook(hook):
    HOOKS.append(hook)
def step():
    for hook in HOOKS:
        hook(None, (), {})
"""

TRAIN = """
import argparse, json, os, signal, sys, time
from torch.optim.optimizer import step
parser = argparse.ArgumentParser()
for name, kind, default in (("out", str, "."), ("epochs", int, 3), ("batch-size", int, 8), ("seconds", float, 0.01)):
    parser.add_argument(f"--{name}", type=kind, default=default)
parser.add_argument("--resume")
parser.add_argument("--ended", type=int, default=1)
args, asked = parser.parse_args(), []
signal.signal(signal.SIGTERM, lambda *heard: asked.append(heard))
rank = int(os.environ.get("RANK", 0))
first = int(open(args.resume).read()) if args.resume else 0
ranks, place = os.environ.get("WORLD_SIZE", 1), os.environ.get("MASTER_ADDR")
print("rank", rank, "of", ranks, "met at", place, "goes on after epoch", first, flush=True)
open("written_where_it_is", "w").close()
for epoch in range(first, args.epochs):
    for _ in range(12):
        time.sleep(args.seconds)
        step()
        if asked:
            sys.exit(args.ended)
    if not rank:
        with open(f"{args.out}/log.jsonl", "a") as log:
            log.write(json.dumps({"step": epoch + 1, "time": time.time(), "val": 1 / (epoch + 1)}) + "\\n")
        open(f"{args.out}/saved", "w").write(str(epoch + 1))
"""


def write_program(folder: Path) -> Path:
    """Write `train.py` and the modules that it imports into a folder; return the folder."""
    place = folder / "torch/optim"
    place.mkdir(parents=True)
    (folder / "torch/__init__.py").touch()
    (place / "__init__.py").touch()
    (place / "optimizer.py").write_text(OPTIMIZER)
    (folder / "train.py").write_text(TRAIN)
    return folder


def settings(folder: Path, *more: str, **program: Any) -> dict[str, Any]:
    """Return the settings of a run of the program; `python3` is the interpreter of the machine or of the container."""
    words = ["--out", "{out}", "--epochs", "{epochs}", "--batch-size", "{batch_size}", *more, "{resume}"]
    own: dict[str, Any] = {} if "command" in program else {"batch_size": 8, "training": {"epochs": 3}}
    return {
        **own,
        "throughput": {"warmup": 0, "trials": 1, "batches": 10, "seconds": 0, "beside": 0},
        "program": {
            "command": ["python3", "train.py", *words],
            "folder": str(folder),
            "log": "{out}/log.jsonl",
            "losses": {"val": "loss/valid"},
            "resume": ["--resume", "{out}/saved"],
            **program,
        },
    }
