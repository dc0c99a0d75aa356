"""Typical training program without dlscale, with its own options, log and checkpoint."""

import argparse
import json
import os
import time
from pathlib import Path

import neighbour
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--sleep", type=float, default=0.0, help="seconds that each step sleeps")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--fail-after", type=int, help="epochs after which the first try fails")
args = parser.parse_args()

neighbour.note_environment()
torch.set_num_threads(1)
torch.manual_seed(args.seed)
rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
model: nn.Module = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
if ranks > 1:
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
x = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x.square().mean(1, keepdim=True))
sampler: DistributedSampler[object] | None = DistributedSampler(data) if ranks > 1 else None
loader = DataLoader(data, args.batch_size // ranks, sampler=sampler, shuffle=sampler is None)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
saved, first, step = args.out / "saved.pt", 0, 0
if args.resume:
    state = torch.load(saved, weights_only=True)
    model.load_state_dict(state["model"])
    first, step = state["epoch"], state["step"]
for epoch in range(first, args.epochs):
    for inputs, targets in loader:
        time.sleep(args.sleep)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    if rank == 0:
        with torch.no_grad():
            valid = nn.functional.mse_loss(model(x), data.tensors[1])
        with (args.out / "log.jsonl").open("a") as log:
            log.write(json.dumps({"step": step, "time": time.time(), "train": loss.item(), "val": valid.item()}) + "\n")
        torch.save({"model": model.state_dict(), "epoch": epoch + 1, "step": step}, saved)
    if args.fail_after == epoch + 1 and not args.resume:
        raise SystemExit(3)
if ranks > 1:
    torch.distributed.destroy_process_group()
