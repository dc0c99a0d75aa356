"""Predict the memory of the larger ViT, split in different ways, without a GPU."""

from functools import partial

import torch

from bench.cases import sizes
from dlscale.core import registry
from dlscale.extensions.memory.prediction import of_run
from dlscale.train.memory import FakeStep

case, study = sizes(small=False)[2], registry.study("era5_vit")
node, nodes = {"gpus_per_node": 4}, {"nodes": 4, "gpus_per_node": 4}
fused, cpu = {"fused": True}, torch.device("cpu")
for over in (
    {"geometry": node},
    {"geometry": {**nodes, "tp": 4}},
    {"geometry": {**nodes, "cp": 4}},
    {"geometry": node, "parallel": {"kind": "fsdp"}},
    {"geometry": node, "activation_checkpointing": "selective"},
    {"geometry": node, "activation_checkpointing": True},
    {"geometry": {**nodes, "tp": 4}, "activation_checkpointing": True},
):
    run = case.run(batch_size=64, precision="fp16", optimizer=fused, **over)
    x, y = (torch.empty(16, *shape, device="meta") for shape in case.shapes)
    model = partial(case.network, run)
    step = FakeStep(run, model, case.loss(), cpu, sharding=study.sharding)
    print(over, of_run(run, step, (x, y)))
