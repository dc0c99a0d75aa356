"""Stand-in for `train.py` of the Deep Learning at Scale tutorials: of SC23 if there is a ViT.yaml, else of SC22."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import tiny
import torch
import yaml
from torch.utils.tensorboard import SummaryWriter

logging.basicConfig(format="%(asctime)s - %(name)s - %(levelname)s - %(message)s", level=logging.INFO)
VIT = Path("config/ViT.yaml").exists()

parser = argparse.ArgumentParser()
parser.add_argument("--yaml_config", default="config/ViT.yaml" if VIT else "config/UNet.yaml")
parser.add_argument("--config", default="base")
parser.add_argument("--run_num", default="00")
parser.add_argument("--num_iters" if VIT else "--num_epochs", type=int)
parser.add_argument("--num_data_workers", type=int)
parser.add_argument("--local_batch_size", type=int)
parser.add_argument("--data_loader_config")
parser.add_argument("--amp_mode", choices=["none", "fp16", "bf16"], default="none")
parser.add_argument("--enable_fused" if VIT else "--enable_apex", action="store_true")
parser.add_argument("--enable_jit", action="store_true")
args = parser.parse_args()
params = yaml.safe_load(Path(args.yaml_config).read_text())[args.config]
size = args.local_batch_size or params["global_batch_size"] // tiny.RANKS

model = tiny.network()
training, validation = tiny.loader(params["Nsamples"], size), tiny.loader(4 * size * tiny.RANKS, size)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
board = None
if tiny.RANK == 0:
    board = SummaryWriter(f"{params['expdir']}/{args.config}/{tiny.RANKS}GPU/{args.run_num}/logs/")


def add(tag: str, value: float, step: int) -> None:
    if board:
        board.add_scalar(tag, value, step)


def score(step: int) -> float:
    """Validate; log and return the loss."""
    loss = tiny.validate(model, validation)
    add("Loss/valid", loss, step)
    if VIT:
        add("RMSE(u10m)/valid", loss**0.5, step)
    return loss


if VIT:  # validate before the first step
    first = tiny.validate(model, training)
    add("Loss/train", first, 0)
    tiny.note(0.0, first, score(0))
steps = 0
for epoch in range(args.num_iters // len(training) if VIT and args.num_iters else getattr(args, "num_epochs", 0) or 4):
    loss, seconds = tiny.train(model, training, optimizer)
    steps += len(training)
    rate = len(training) * size * tiny.RANKS / seconds
    if board:
        logging.info("Time taken for epoch %s is %s sec, avg %s samples/sec", epoch + 1, seconds, rate)
        logging.info("  Avg train loss=%f", loss)
    add("Loss/train", loss, steps)
    add("Learning Rate", optimizer.param_groups[0]["lr"], steps)
    valid = score(steps)
    if board:
        logging.info("  Avg val loss=%f", valid)
        board.flush()
    tiny.note(rate, loss, valid)
