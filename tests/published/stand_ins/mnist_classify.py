"""Stand-in for the workshop's `mnist_classify.py`: all settings are arguments, and all results are printed."""

from __future__ import annotations

import argparse

import tiny
import torch

parser = argparse.ArgumentParser()
for name, kind in {"batch-size": int, "test-batch-size": int, "epochs": int, "lr": float, "gamma": float}.items():
    parser.add_argument(f"--{name}", type=kind)
parser.add_argument("--no-cuda", action="store_true")
parser.add_argument("--log-interval", type=int, default=10)
args = parser.parse_args()

model = tiny.network()
training, validation = tiny.loader(320, args.batch_size), tiny.loader(100, 100)
optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
for epoch in range(1, args.epochs + 1):

    def told(step: int, loss: float, epoch: int = epoch) -> None:
        if step % args.log_interval == 0:
            share = 100 * step / len(training)
            print(f"Train Epoch: {epoch} [{step * args.batch_size}/320 ({share:.0f}%)]\tLoss: {loss:.6f}")

    loss, seconds = tiny.train(model, training, optimizer, told)
    valid = tiny.validate(model, validation)
    print(f"\nTest set: Average loss: {valid:.4f}, Accuracy: 93/100 (93%)\n")
    tiny.note(320 / seconds, loss, valid)
    schedule.step()
