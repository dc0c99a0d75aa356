"""Cost of averaging gradients between processes, and of saving checkpoints."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from bench.cases import Case
from bench.measure import Options, Row, in_turns
from bench.training import CPU, FULL_UNET, FULL_VIT, adam, counts, label, one_thread
from dlscale.config.run import Geometry
from dlscale.core.machine import let_threads_wait
from dlscale.core.metrics import Untrained
from dlscale.parallel.rendezvous import join
from dlscale.parallel.shards import own_shards
from dlscale.parallel.world import World
from dlscale.train.checkpoint import CheckpointRecord, Checkpoints
from tests.exchanged import Counting

RANKS = 2
#: Factor on the batch size of a case, so that computing takes long enough to hide communication.
LARGER = 8
#: Seconds between saves.
INTERVAL = 2.0


def ranks(options: Options) -> list[Row]:
    """Measure averaging in two single-threaded processes, which compete for memory bandwidth; then measure saving."""
    found = options.folder / "found.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, (port, options, found), nprocs=RANKS)  # type: ignore[attr-defined]
    rows = [Row(**row) for row in json.loads(found.read_text())]
    with one_thread():
        return [*rows, *(row for case in (FULL_UNET, FULL_VIT) for row in _saving(options, case))]


def _rank(rank: int, port: int, options: Options, found: Path) -> None:
    let_threads_wait()
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    with join(Geometry(gpus_per_node=RANKS), "cpu") as world:
        cases = [replace(case, batch_size=LARGER * case.batch_size) for case in (FULL_UNET, FULL_VIT)]
        rows = [row for case in cases for row in _averaging(options, case, world)]
    if world.main:
        found.write_text(json.dumps(rows))


def _averaging(options: Options, case: Case, world: World) -> list[dict[str, Any]]:
    """Return rows that compare a step with the same step without averaging, and with PyTorch's DDP in a bare loop."""
    geometry = {"gpus_per_node": RANKS}
    step = case.step(CPU, world=world, geometry=geometry, batch_size=RANKS * case.batch_size)
    batch = case.batch(CPU, seed=world.rank)
    bare = _bare(case)
    for _ in range(2):  # two steps, because DDP arranges its buckets after its first step
        step(*batch), bare(*batch)
    with Counting() as counting:
        step(*batch)
    steps = 1 if options.quick else 2

    def rate(call: Callable[..., torch.Tensor], context: Callable[[], Any] = nullcontext) -> Callable[[], float]:
        def turn() -> float:
            world.barrier()
            start = time.perf_counter()
            with context():
                for _ in range(steps):
                    call(*batch)
            world.barrier()
            return steps * RANKS * case.batch_size / (time.perf_counter() - start)

        return turn

    contestants = {"ours": rate(step), "twin": rate(step, step.strategy.unsynchronised), "bare": rate(bare)}
    found = in_turns(4 * options.repetitions, contestants)
    counted = {**counts(case, step.model, steps), "processes": RANKS, "MB averaged": counting.bytes["all_reduce"] / 1e6}
    return [
        {
            **{"name": f"DDP, {label(case)}", "unit": "samples/s", "values": found["ours"], "counted": counted},
            **{"reference": reference, "references": found[name], "target": target},
        }
        for name, reference, target in (("twin", "no-sync twin", 0.95), ("bare", "PyTorch's DDP, bare loop", 0.98))
    ]


def _bare(case: Case) -> Callable[..., torch.Tensor]:
    """Return the step of a hand-written loop with PyTorch's DDP."""
    model, loss = case.step(CPU).model, case.loss()
    wrapped, optimizer = DistributedDataParallel(model, gradient_as_bucket_view=True), adam(case, model)
    model.train()

    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        value = loss(wrapped(x), y).mean()
        value.backward()
        optimizer.step()
        return value.detach()

    return call


def _saving(options: Options, case: Case) -> list[Row]:
    """Return two rows for a training that saves every two seconds: the fraction of unblocked time, and the speed."""
    step, batch, world = case.step(CPU), case.batch(CPU), World()
    checkpoints = Checkpoints(options.folder / case.study, keep=1, world=world)
    blocked, alone = list[float](), list[float]()
    number = 0

    def train(save: bool) -> float:
        nonlocal number
        begin, done = time.perf_counter(), 0
        if save:
            number += 1
            shards = own_shards(step.shards(), world)
            checkpoints.save(CheckpointRecord(step=number, untrained=Untrained(valid_loss=1.0)), shards)
            blocked.append(time.perf_counter() - begin)
        while time.perf_counter() - begin < (0.2 if options.quick else INTERVAL):
            step(*batch)
            done += 1
        spent = time.perf_counter() - begin
        if save:  # wait for the rest of the write outside the timed training
            checkpoints.wait()
        return done * case.batch_size / spent

    step(*batch)
    found = in_turns(2 * options.repetitions, {"saving": lambda: train(True), "not": lambda: train(False)})
    record = CheckpointRecord(step=number, untrained=Untrained(valid_loss=1.0))
    for _ in range(3):  # saves that block until the write ends, for comparison
        begin = time.perf_counter()
        checkpoints.save(record.model_copy(update={"step": number}), own_shards(step.shards(), world))
        checkpoints.wait()
        alone.append(time.perf_counter() - begin)
        number += 1
    counted = {
        **counts(case, step.model, 0),
        "MB": sum(shard.tensor.nbytes for shard in step.shards().values()) / 1e6,
        "ms blocked": 1e3 * sorted(blocked)[len(blocked) // 2],
        "ms in all": 1e3 * min(alone),
        "seconds between": INTERVAL,
    }
    free = [1 - spent / INTERVAL for spent in blocked]
    return [
        Row(f"saving, {label(case)}", "of the time", free, "never blocked", [1.0] * len(free), counted, target=0.98),
        Row(f"saving, {label(case)}", "samples/s", found["saving"], "without a save", found["not"], counted),
    ]
