"""Stand-in for `train_single_gpu.py` and `train_multi_gpu.py`, which prints tensors and resumes from a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

import tiny
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--yaml_config", default="./configs/default.yaml")
parser.add_argument("--config", default="default")
parser.add_argument("--root_dir", default="./outputs")
parser.add_argument("--run_num", default="0")
args = parser.parse_args()
state = Path(args.root_dir, args.config, args.run_num, "checkpoints/ckpt.tar")
state.parent.mkdir(parents=True, exist_ok=True)

print(f"running on rank {tiny.RANK} with world size {tiny.RANKS}")
model = tiny.network()
training, validation = tiny.loader(128, 32 // tiny.RANKS), tiny.loader(32, 32)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
begun = torch.load(state)["epoch"] + 1 if state.exists() else 0
for epoch in range(begun, 25):
    loss, seconds = tiny.train(model, training, optimizer)
    valid = tiny.validate(model, validation)
    if tiny.RANK == 0:
        torch.save({"epoch": epoch, "model_state": model.state_dict()}, state)
        print(f"Time taken for epoch {epoch + 1} is {seconds} sec; with {seconds}/0.1 in tr/val")
        print(f"Loss = {torch.tensor([loss])}, Val loss = {torch.tensor([valid])}")
    tiny.note(128 / seconds, loss, valid)
print("Training complete")
