"""Compare an MLP on two processes with the serial MLP: outputs, and the gradient of each weight."""

from collections import OrderedDict

import torch
from torch import nn

from dlscale.config.run import Geometry
from dlscale.parallel.model import ModelParallel
from dlscale.parallel.rendezvous import join
from dlscale.parallel.sharding import Sharding
from dlscale.parallel.world import Mesh


def mlp():
    """Return an MLP whose weights are equal on all processes."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    return nn.Sequential(OrderedDict(first=nn.Identity(), mlp=layers, last=nn.Identity()))


plan = Sharding(tokens=8, first="first", last="last", gather=["mlp"], columns=["mlp.0"], rows=["mlp.2"])
geometry, serial, parallel, x = Geometry(gpus_per_node=2, tp=2), mlp(), mlp(), torch.randn(4, 8, 16)
with join(geometry, "cpu") as world:
    split = ModelParallel(parallel, plan, Mesh(geometry, "cpu"), world.device)
    expected, found = serial(x), parallel(x)
    torch.testing.assert_close(found, expected)
    expected.square().sum().backward()
    (split.loss_weight * found.square().sum()).backward()
    split.sum_gradients(dict(parallel.named_parameters()))
    whole = dict(serial.named_parameters())
    for name, part in parallel.named_parameters():
        gradient = whole[name].grad
        for cut in split.cuts.get(name, ()):
            gradient = cut.part(gradient)
        torch.testing.assert_close(part.grad, gradient)
        print(f"rank {world.rank}: {name} {list(part.shape)} of {list(whole[name].shape)}: equal gradients")
