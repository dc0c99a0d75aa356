"""Build a run's training step from the run's settings; training and measurements use the same step."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dlscale.config.laws import check_fields
from dlscale.config.run import DDP, Optimizer, RunCore
from dlscale.core import registry
from dlscale.core.errors import Refused, UserError
from dlscale.data.loaders.base import Loader, Share, open_loader, open_samples
from dlscale.data.manifest import Manifest
from dlscale.data.samples import Samples, samples_in
from dlscale.parallel.model import ModelParallel, drawing
from dlscale.parallel.sharding import Sharding
from dlscale.parallel.strategy import Gradients, strategy_of, synchronised
from dlscale.parallel.world import AXES, World
from dlscale.studies.base import SampleLoss, Study
from dlscale.train.attention import Context, attention_context
from dlscale.train.loop import Batch
from dlscale.train.precision import (
    Weights,
    check_channels_last,
    check_convolutions,
    compute_dtype,
    convert,
    set_matmul_precision,
)
from dlscale.train.step import CudaBackend, Network, Step

#: Optimisers by their names in the configuration.
CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adadelta": torch.optim.Adadelta,
}


def build_step(
    run: RunCore,
    make: Callable[[], nn.Module],
    loss: SampleLoss,
    world: World | None = None,
    sharding: Callable[[nn.Module], Sharding] = lambda model: Sharding(),
    draws: bool = False,
    scores: SampleLoss | None = None,
) -> Step:
    """Build the step of a run.

    `make` returns the model, with weights drawn from torch's random state. `loss` returns the loss of each sample [B].
    `sharding`, `draws` and `scores` are the study's `sharding`, `draws` and `train_scores`.
    """
    world = world or World()
    device = world.device
    if run.cuda_graph and device.type != "cuda":
        raise UserError(f"cuda_graph: the device is {device.type}, but only CUDA has graphs. Set cuda_graph to false")
    set_matmul_precision(run.precision)
    torch.backends.cudnn.benchmark = True  # use the fastest algorithm for each shape

    # 1. Make the model. Weights are drawn on the host from the seed, so weights are equal on any device and any
    #    number of ranks. (A model too large for a host would need `meta` tensors here, and weights drawn after 2.)
    torch.manual_seed(run.seed)
    model = make()
    partition = sharding(model)
    # 2. Divide the model among the devices that share the model; each device keeps its part.
    divided = None
    if world.mesh:
        if not draws and (layer := drawing(model)):
            raise UserError(
                f"geometry: study {run.study}: {layer} draws random numbers, but the study does not declare this, so "
                "devices that share a model would all draw the same numbers. Let the study's draws(run) return True"
            )
        own = random_seed(run.seed, *(world.mesh.rank(axis) for axis in AXES)) if draws else None
        divided = ModelParallel(model, partition, world.mesh, device, own)
    elif world.data_size > 1 and isinstance(run.parallel, DDP) and run.parallel.sync_batchnorm:
        model = synchronised(model, device)
    if device.type == "cpu" and compute_dtype(run.precision) == torch.bfloat16:
        check_convolutions(model)
    if device.type == "cpu" and run.memory_format == "channels_last":
        check_channels_last(model)
    # 3. Move the model to its device and memory format.
    model.to(device).to(memory_format=memory_format(model, run.memory_format))  # type: ignore[call-overload]
    # 4. and 5. Set the number format, and add the loss, the exchange with other ranks, and the optimiser.
    graphs = CudaBackend(device) if run.cuda_graph else None
    step = assemble(run, model, loss, world, _attention(model, run, world), partition, divided, graphs, scores)
    # 6. Compile the step, and record it as a CUDA graph, if the run's settings require this.
    if run.compile.mode != "none":
        torch._functorch.config.activation_memory_budget = run.compile.memory_budget
        logging.info("code is compiled at the first batch of each shape, which may take minutes")
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
    partition: Sharding | None = None,
    divided: ModelParallel | None = None,
    graphs: CudaBackend | None = None,
    scores: SampleLoss | None = None,
) -> Step:
    """Return the uncompiled step of a model that is already on its device and in its memory format."""
    exact = convert(model, run.precision, run.keep_norms_fp32)
    if run.precision.startswith("fp8"):
        registry.provided("float8", None)(model, run.precision)
    # 4. Wrap model and loss, so that gradients are averaged over the data-parallel ranks.
    network = Network(model, loss, run.precision, memory_format(model, run.memory_format), scores)
    strategy = strategy_of(run, world)
    strategy.wrap(network, partition or Sharding(), graphs.aside if graphs else contextlib.nullcontext)
    # 5. Build the optimiser for the weights on this device.
    weights = Weights(model, exact, divided.cuts if divided else {})
    gradients = Gradients(weights.named, world, divided, run.optimizer.clip_norm)
    optimizer = build_optimizer(weights.updated, run.optimizer, world.device if graphs else None)
    return Step(run, weights, network, strategy, gradients, optimizer, attention, divided)


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter], settings: Optimizer, capture: torch.device | None = None
) -> torch.optim.Optimizer:
    """Return the optimiser; `capture` is the device on which a CUDA graph will record its update."""
    options = settings.model_dump(exclude={"kind", "lr", "fused", "clip_norm"})  # the other keys have PyTorch's names
    options["lr"] = settings.lr if capture is None else torch.tensor(settings.lr, device=capture)
    if settings.fused:  # False would also switch off `foreach`, PyTorch's default on a GPU
        options["fused"] = True
    if capture is not None and settings.kind != "sgd":
        options["capturable"] = True
    return CLASSES[settings.kind](parameters, **options)


def random_seed(*numbers: int) -> int:
    """Return a seed computed from these numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def memory_format(model: nn.Module, kind: str) -> torch.memory_format:
    """Return PyTorch's format for the run's `memory_format`, for volumes if the model has weights with five axes."""
    if kind == "contiguous":
        return torch.preserve_format
    return torch.channels_last_3d if any(p.dim() == 5 for p in model.parameters()) else torch.channels_last


def _attention(model: Any, run: RunCore, world: World) -> Context:
    if run.attention == "default":
        return contextlib.nullcontext
    heads, tokens, width = model.attention_shape
    shape = (-(-run.local_batch_size // run.accumulation_steps), heads // run.geometry.tp, tokens, width)
    return attention_context(
        run.attention, shape, compute_dtype(run.arithmetic), world.device, lambda kind: world.gather(kind)[0]
    )


def _each(loss: SampleLoss, study: str) -> SampleLoss:
    """Wrap a study's loss with a check that it returns one number per sample."""

    def call(prediction: Any, target: Any) -> torch.Tensor:
        losses, samples = loss(prediction, target), samples_in(target)
        if losses.shape != (samples,):
            raise UserError(
                f"study {study}: its loss has shape {tuple(losses.shape)} for {samples} samples; expected one "
                f'number for each sample, shape ({samples},). Use reduction="none", and a mean over all axes '
                "except the first"
            )
        return losses

    return call


@dataclass(frozen=True)
class Session:
    """An opened run: settings, data, ranks, study and training step."""

    run: RunCore
    manifest: Manifest
    world: World
    study: Study
    step: Step

    def share(self) -> Share:
        return Share(self.run.batch_size, self.world.data_rank, self.world.data_size)

    def loader(self, split: str) -> Loader:
        """Return the loader of a split, of the run's kind (`loader`) for every split."""
        samples = self.samples(split)
        if split == "train" and samples.size < self.run.batch_size:
            logging.warning(
                "batch_size %d is more than the %d training samples: an epoch is one step, with all samples, and a "
                "learning rate chosen for batches of %d may be too high. Use batch_size %d or less, or more training "
                "samples",
                *(self.run.batch_size, samples.size, self.run.batch_size, samples.size),
            )
        return open_loader(self.run, samples, self.share(), self.world.device)

    def samples(self, split: str) -> Samples:
        return open_samples(self.run, self.manifest, split)

    def training_batches(self, loader: Loader, first_epoch: int) -> Generator[Batch]:
        """Yield training batches of all epochs from `first_epoch` on: (input, target, weight of this rank's loss)."""
        share = self.share()
        for epoch in itertools.count(first_epoch):
            for number, (x, y) in enumerate(loader.epoch(epoch)):
                yield x, y, share.weight(number, loader.samples)

    @property
    def devices(self) -> int:
        """Number of devices that compute: one per process, unless a process drives several GPUs."""
        return self.run.geometry.world_size if self.world.device.type == "cuda" else self.world.size

    @property
    def parameters(self) -> int:
        """Number of trainable parameters of the model."""
        weights = self.step.weights
        return sum(weights.shard(name, p).shape.numel() for name, p in weights.named.items() if p.requires_grad)


def own_cores(run: RunCore, threads: int | None) -> int | None:
    """Return the number of CPUs of each process: the run's `cpus`, else an equal part of a node's `threads`, else None.

    srun may bind a process to fewer CPUs than its part of a complete node; then only these CPUs count.
    """
    return run.cpus or (
        min(max(1, threads // run.processes.gpus_per_node), len(os.sched_getaffinity(0))) if threads else None
    )


def own_threads(run: RunCore, threads: int | None) -> int | None:
    """Return the number of CPU threads of each process: the run's `threads`, else the number of its CPUs."""
    return run.threads or own_cores(run, threads)


def _keep_to(cpus: int, local_rank: int, processes: int) -> None:
    """Bind this process and its children to its part of the usable CPUs."""
    there = sorted(os.sched_getaffinity(0))
    if len(there) < cpus:
        raise UserError(
            f"geometry.cpus: {cpus} CPUs per process, but this process may use only {len(there)}. Lower geometry.cpus"
        )
    # Slurm may already have restricted the usable CPUs to this process's part.
    first = cpus * local_rank if len(there) >= cpus * processes else 0
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), there[first : first + cpus])


def open_session(
    run: RunCore,
    manifest: str | Path,
    world: World,
    threads: int | None = None,
) -> Session:
    """Set up all parts of a run (`Session`) except its loaders.

    `threads` is the number of CPU threads of a node. Equal numbers of threads give bitwise equal results on a CPU.
    """
    if len(set(world.gather(run.model_dump_json()))) > 1:
        raise UserError(
            f"the {world.size} connected processes have different configurations: either two runs use the same "
            "address, or a node reads another file system. Start the nodes of one run with the same command"
        )
    if run.cpus:
        _keep_to(run.cpus, world.local_rank, run.processes.gpus_per_node)
    if own := own_threads(run, threads):
        torch.set_num_threads(own)
    data = Manifest.read(manifest)
    data.check_files()
    study: Study = registry.study(run.study)
    if getattr(run.samples, "kind", "") == "rows":
        check_fields(run.samples, data.fields)  # before the study reads a missing field
    for grid in [tuple(info.grid) for info in data.fields.values() if info.grid]:
        try:
            study.check_grid(run, grid)
        except Refused as error:
            raise UserError(str(error)) from None
    make, loss = partial(study.model, run, data), _each(study.loss(run), run.study)
    scores = study.train_scores if study.train_metrics else None
    step = build_step(run, make, loss, world, study.sharding, study.draws(run), scores)
    if world.data_rank:  # equal weights on all ranks, but different drop-out
        torch.manual_seed(random_seed(run.seed, world.data_rank))
    return Session(run, data, world, study, step)
