"""Stand-in for `imagenet_ddp_apex.py` (started by torch.distributed.launch) and for its version for one GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

import tiny
import torch
from torch.utils.tensorboard import SummaryWriter

parser = argparse.ArgumentParser()
parser.add_argument("data", type=Path)
parser.add_argument("-a", "--arch", default="resnet50")
parser.add_argument("-b", "--batch-size", type=int, default=8)
parser.add_argument("-j", "--workers", type=int)
parser.add_argument("--epochs", type=int, default=90)
parser.add_argument("--opt-level")
parser.add_argument("--print-freq", type=int, default=10)
parser.add_argument("--local_rank", "--local-rank", type=int, default=0)
args = parser.parse_args()
assert (args.data / "train").is_dir()

model = tiny.network()
count = 20 * args.batch_size * tiny.RANKS
training, validation = tiny.loader(count, args.batch_size), tiny.loader(count // 10, args.batch_size)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
board = SummaryWriter(comment=f"_{args.arch}_gpux{tiny.RANKS}_b{args.batch_size}") if tiny.RANK == 0 else None
for epoch in range(args.epochs):
    loss, seconds = tiny.train(model, training, optimizer)
    valid, rate = tiny.validate(model, validation), count / seconds
    if board:
        print(f"Epoch: [{epoch}][20/20]\tTime 0.1 (0.1)\tThroughput {rate:.3f} ({rate:.3f})\tLoss {loss:.10f}")
        scalars = {"Throughput/train": rate, "Loss/train": loss, "Loss/val": valid, "Top1/val": 75.0, "Top5/val": 93.0}
        for tag, value in {**scalars, "Lr": 0.01}.items():
            board.add_scalar(tag, value, epoch + 1)
        board.flush()
    tiny.note(rate, loss, valid)
