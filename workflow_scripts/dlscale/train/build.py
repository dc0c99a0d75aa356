"""From a run's settings to the step that training repeats and throughput is measured of."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlscale.config.parallel import DDP, DP
from dlscale.config.run import RunCore
from dlscale.core import registry
from dlscale.core.errors import Refused, UserError
from dlscale.data.loaders.arranged import open_loader
from dlscale.data.loaders.base import Loader, Share
from dlscale.data.manifest import Manifest
from dlscale.data.samples import Samples
from dlscale.parallel.batchnorm import synchronised
from dlscale.parallel.world import World
from dlscale.studies.base import SampleLoss, Study
from dlscale.train.attention import Context, attention_context
from dlscale.train.graph import CudaBackend
from dlscale.train.optimizer import build_optimizer
from dlscale.train.precision import Weights, compute_dtype, set_matmul_precision
from dlscale.train.selfcheck import check_layers, check_operations
from dlscale.train.step import Copied, Network, Step

#: PyTorch's own (`torch.nn.parallel.distributed._DEFAULT_BUCKET_CAP_MB`).
BUCKET_MB = 25


def build_step(run: RunCore, make: Callable[[], nn.Module], loss: SampleLoss, world: World | None = None) -> Step:
    """Build the step of a run: every part of building has its place here, in a fixed order.

    `make` makes the model and draws its weights from torch's random state; `loss` is that of each sample [B].
    """
    world = world or World()
    device = world.device
    if run.cuda_graph and device.type != "cuda":
        raise UserError(f"cuda_graph: the device is a {device.type}, and only CUDA has graphs; set it to false")
    set_matmul_precision(run.precision)
    torch.backends.cudnn.benchmark = True  # the fastest algorithm for each shape, as all published programs ask

    # 1. Made, its weights drawn from the seed on the host: they are the same on every device and number of ranks.
    #    (A model too large for a host would be made on `meta`, and its weights drawn after 2.)
    torch.manual_seed(run.seed)
    model = make()
    # 2. Sharded: the place of a plan that splits layers over ranks. Every rank holds the whole model so far.
    if world.data_size > 1 and isinstance(run.parallel, DDP) and run.parallel.sync_batchnorm:
        model = synchronised(model, device)
    # 3. Placed: device and layout.
    model.to(device).to(memory_format=memory_format(model, run.memory_format))  # type: ignore[call-overload]
    # 4. and 5. Its number format, its loss, the other ranks, the optimiser.
    graphs = CudaBackend(device) if run.cuda_graph else None
    step = assemble(run, model, loss, world, _attention(model, run, world), graphs)
    # 6. Compiled, or recorded: what the parts above have become.
    if run.compile.mode != "none":
        logging.info("compiled for each shape of batch when it first comes, which takes up to minutes")
    step.compile(run.compile.mode)
    if graphs:
        step.capture(graphs)
    return step


def assemble(
    run: RunCore,
    model: nn.Module,
    loss: SampleLoss,
    world: World,
    attention: Context,
    graphs: CudaBackend | None = None,
) -> Step:
    """Return the step of a model that is where it shall be, in the layout that it shall have; it is not compiled."""
    weights = Weights(model, run.precision)
    # 4. Wrapped, with its loss: gradients are averaged over the data-parallel ranks.
    network = Network(model, loss, run.precision, memory_format(model, run.memory_format))
    wrapped = wrap(network, run, world, graphs)
    # 5. The optimiser, of the weights as they are placed.
    optimizer = build_optimizer(weights.updated, run.optimizer, world.device if graphs else None)
    return Step(run, weights, network, wrapped, optimizer, attention)


def wrap(network: Network, run: RunCore, world: World, graphs: CudaBackend | None = None) -> nn.Module:
    """Return the network, or with several data-parallel ranks what averages its gradients over them.

    With `graphs` it is made on their stream: it keeps the nodes of autograd that gather gradients, which work on the
    stream on which they were made, and a graph bears no other.
    """
    parallel = run.parallel
    if isinstance(parallel, DP):
        return _copied(network, run.geometry.gpus_per_node, world.device)
    if world.data_size == 1 or not parallel.sync:
        return network
    options: dict[str, Any] = {
        "device_ids": [world.device] if world.device.type == "cuda" else None,
        "bucket_cap_mb": parallel.bucket_mb,
        "forward_sync_buffers": parallel.broadcast_buffers,
        "gradient_as_bucket_view": parallel.bucket_view,
        "static_graph": parallel.static_graph,
    }
    if parallel.first_bucket_mb is not None:  # the last of these holds for all that follow
        options["bucket_cap_mb_list"] = [parallel.first_bucket_mb, parallel.bucket_mb or BUCKET_MB]
    with graphs.aside() if graphs else nullcontext():
        wrapped = DistributedDataParallel(network, **options)
    # Else it would time every hundredth step by events, for which the host waits, and which a graph must not have.
    wrapped._set_ddp_runtime_logging_sample_rate(2**31 - 1)
    return wrapped


def _copied(network: Network, gpus: int, device: torch.device) -> nn.Module:
    """Return the network as one process computes it on so many GPUs; a CPU is one device, and has no copies."""
    if device.type != "cuda":
        return network
    if gpus > (there := torch.cuda.device_count()):
        raise UserError(
            f"geometry.gpus_per_node: this run asks for {gpus} GPUs, and PyTorch sees {there} here; ask for as many, "
            "or lower it"
        )
    return Copied(network, list(range(gpus)))


def memory_format(model: nn.Module, kind: str) -> torch.memory_format:
    """Return PyTorch's name of a run's `memory_format`, by the dimensions of the model's convolutions."""
    if kind == "contiguous":
        return torch.preserve_format
    volumes = any(p.dim() == 5 for p in model.parameters())
    return torch.channels_last_3d if volumes else torch.channels_last


def _attention(model: Any, run: RunCore, world: World) -> Context:
    """Return the context of the model's attention, if it has any."""
    if run.attention == "default":
        return nullcontext
    heads, tokens, width = model.attention_shape
    shape = (-(-run.local_batch_size // run.accumulation_steps), heads, tokens, width)
    dtype, drop = compute_dtype(run.precision), model.attention_dropout
    return attention_context(run.attention, shape, drop, dtype, world.device, lambda kind: world.gather(kind)[0])


def _each(loss: SampleLoss, study: str) -> SampleLoss:
    """Return a study's loss, which refuses to be anything but one number for each sample."""

    def call(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = loss(prediction, target)
        if losses.shape != target.shape[:1]:
            raise UserError(
                f"study {study}: its loss has shape {tuple(losses.shape)} for {len(target)} samples; expected one "
                f'number for each, ({len(target)},): reduction="none", and a mean over the axes but the first'
            )
        return losses

    return call


def open_samples(run: RunCore, manifest: Manifest, split: str) -> Samples:
    """Return the samples of a split, as the kind of dataset of the run's study has them."""
    module = registry.module_of(registry.study(run.study).dataset, "samples")
    assert module is not None  # rows serve a kind that has none of its own
    samples: Samples = registry.load(module).open_samples(manifest, split, run.samples, run.seed)
    return samples


@dataclass(frozen=True)
class Session:
    """What a stage of a run works with."""

    run: RunCore
    manifest: Manifest
    world: World
    study: Study
    step: Step

    def share(self) -> Share:
        return Share(self.run.batch_size, self.world.data_rank, self.world.data_size)

    def loader(self, split: str) -> Loader:
        """Return the loader of a split; validation goes through the same loader as training."""
        samples = self.samples(split)
        if split == "train" and samples.size < self.run.batch_size:
            logging.warning("an epoch of %d samples is less than one batch (%d)", samples.size, self.run.batch_size)
        build: Callable[..., Loader] = registry.load(registry.loader(self.run.loader.kind)).build
        delivery = self.step.network.delivery
        if split != "train":  # metrics see the inputs, too: naive answers are made of them
            delivery = replace(delivery, dtype=torch.float32)
        return open_loader(build, samples, self.run.loader, self.share(), self.world.device, delivery)

    def samples(self, split: str) -> Samples:
        return open_samples(self.run, self.manifest, split)

    @property
    def devices(self) -> int:
        """Devices that compute: as many as processes, unless one process drives several GPUs."""
        return self.run.geometry.world_size if self.world.device.type == "cuda" else self.world.size

    @property
    def parameters(self) -> int:
        """Trainable parameters of the model."""
        return sum(p.numel() for p in self.step.model.parameters() if p.requires_grad)


def own_threads(run: RunCore, threads: int | None) -> int | None:
    """Return the CPU threads of each process: those of the run, or its share of a node's; None if nobody says."""
    return run.threads or (max(1, threads // run.processes.gpus_per_node) if threads else None)


def open_session(run: RunCore, manifest: str | Path, world: World, threads: int | None = None) -> Session:
    """Set up everything but the loaders.

    `threads` are a node's, which its ranks share; results on a CPU are bitwise repeatable for the same number.
    """
    if len(set(world.gather(run.model_dump_json()))) > 1:
        raise UserError(
            f"the {world.size} processes that met have different configurations: either two runs met at one place, or "
            "a node reads another file system; start the nodes of one run with the same command"
        )
    if own := own_threads(run, threads):
        torch.set_num_threads(own)
    data = Manifest.read(manifest)
    data.check_files()
    study: Study = registry.study(run.study)
    for grid in [tuple(info.grid) for info in data.fields.values() if info.grid]:
        try:
            study.check_grid(run, grid)
        except Refused as error:
            raise UserError(str(error)) from None
    step = build_step(run, partial(study.model, run, data), _each(study.loss(run), run.study), world)
    dtype = compute_dtype(run.precision)
    if dtype != torch.float32:
        width = getattr(step.model, "attention_shape", (0, 0, 32))[2]
        last = run.memory_format == "channels_last"
        check_operations(dtype, world.device, last, step.attention, width, study.operations)
    if world.data_rank:  # the same weights everywhere, but each its own drop-out
        sequence = np.random.SeedSequence([run.seed, world.data_rank])
        torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0]))
    session = Session(run, data, world, study, step)
    if dtype != torch.float32 and world.device.type == "cuda":
        spec = session.samples("train").input_spec
        if spec.dtype == "float32":
            check_layers(step.model, step.network.predict, (run.local_batch_size, *spec.shape), world.device)
    return session
