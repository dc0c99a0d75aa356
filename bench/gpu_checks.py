"""Checks of values on a GPU: the samples of every loader, the step of every rung, CUDA graphs and resuming."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.cases import Case
from bench.tasks import Bench, Skip, Task, Values
from dlscale.core.errors import UserError
from dlscale.data.loaders import DirectLoader, direct_loader
from dlscale.data.loaders.base import Loader, Share
from dlscale.data.loaders.direct_loader import Streamed
from dlscale.data.samples import GridSamples
from dlscale.extensions.dali.settings import DaliLoader
from dlscale.train.step import Step, set_learning_rate

UNET = Case("cosmo_unet", {"widths": [8, 12]}, (8, 8, 8), batch_size=6)
VIT = Case("era5_vit", {"patch": 4, "embed_dim": 64, "depth": 1, "heads": 2}, (16, 32), batch_size=6, channels=3)
CROPS = Case("cosmo_unet", {"widths": [4]}, (16, 16, 16), batch_size=4)
PAIRS = Case("era5_vit", {}, (24, 48), batch_size=4, channels=6)

#: Optimiser whose update is linear in the gradient. Adam would make a full step, of either sign, even for a gradient
#: near zero.
SGD: dict[str, Any] = {"kind": "sgd", "lr": 0.5, "momentum": 0.9}
#: Tolerance of a sample's values, relative and absolute: the rounding difference of a fused multiply-add.
DECODING = 1e-6
WORKERS = 4


class Errors(dict[str, float]):
    """The greatest error of each kind so far, by name."""

    def hold(self, name: str, error: float, tolerance: float) -> None:
        """Record an error; raise if it exceeds the tolerance or is NaN."""
        self[name] = max(self.get(name, 0.0), error)
        if not error <= tolerance:
            raise AssertionError(f"{name} is off by {error:.2g}, tolerance {tolerance:g}")


def distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the relative error: the norm of the difference over the norm of the truth."""
    return float((found.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30))


# --- samples -----------------------------------------------------------------------------------------------------


def loader_of(
    bench: Bench,
    samples: GridSamples,
    kind: str,
    batch_size: int,
    workers: int = WORKERS,
) -> Loader:
    """Return a loader that delivers to the device: `resident`, `streamed` (both `direct`) or `dali`."""
    share = Share(batch_size)
    if kind == "dali":
        bench.need_cuda()
        try:
            import nvidia.dali  # noqa: F401
        except ImportError as error:
            raise Skip(str(error)) from None
        from dlscale.extensions.dali import loader as dali_loader

        dali = DaliLoader(kind="dali", workers=workers)
        return dali_loader.build(samples, dali, share, bench.device)
    settings = DirectLoader(
        kind="direct", workers=workers, resident="never" if kind == "streamed" and bench.cuda else "always"
    )
    loader = direct_loader.build(samples, settings, share, bench.device)
    if kind == "streamed" and not bench.cuda:  # on the CPU, use the GPU's code path
        loader._backend = Streamed(samples, batch_size, loader._slots, bench.device)
    return loader


def samples_equal(bench: Bench, kind: str) -> Values:
    """Compare all batches of two epochs, including the incomplete last batch, with plain reads; the device is busy."""
    errors = Errors()
    for case, rows, count in ((CROPS, 24, 30), (PAIRS, 8, 14)):
        path = bench.folder / f"check-{case.study}.h5"
        if not path.exists():
            case.write(path, rows)
        samples = case.samples(path, rows, count)
        with closing(loader_of(bench, samples, kind, case.batch_size)) as loader:
            for epoch in (0, 1):
                indices = iter(range(count))
                for x, y in loader.epoch(epoch):
                    size = 2000 if bench.cuda else 50
                    busy = torch.randn(size, size, device=bench.device)
                    for _ in range(5):
                        busy = busy @ busy
                    truth = [samples.read(epoch, index) for _, index in zip(x, indices, strict=False)]
                    for found, side in zip((x, y), zip(*truth, strict=True), strict=True):
                        wanted = np.stack(side)
                        off = np.abs(found.cpu().numpy() - wanted) / (1 + np.abs(wanted))
                        errors.hold(case.study, float(off.max()), DECODING)
                if next(indices, None) is not None:
                    raise AssertionError(f"{case.study}: an epoch has fewer samples than expected, {count}")
    return {"tolerance": DECODING, **errors}


def samples_ahead(bench: Bench, kind: str, over: dict[str, Any]) -> Values:
    """Compare the batches that steps receive with plain reads, while the host runs many batches ahead of the device.

    A GPU first gets a second of other work, so the check detects a batch that is overwritten before its step.
    """
    if over:
        bench.need_cuda()
    errors, most = Errors(), 0
    for case, rows, count in ((CROPS, 24, 80), (PAIRS, 8, 80)):
        path = bench.folder / f"check-{case.study}.h5"
        if not path.exists():
            case.write(path, rows)
        samples = case.samples(path, rows, count)
        step = case.step(bench.device, precision="bf16", **FUSED, **over) if bench.cuda else make(bench, case)
        with closing(loader_of(bench, samples, kind, case.batch_size)) as loader:
            for x, y in loader.epoch(0):  # the first epoch captures the graph and allocates buffers
                step(x, y)
            read: list[tuple[torch.Tensor, torch.Tensor]] = []
            done: list[torch.cuda.Event] = []
            if bench.cuda:
                torch.cuda._sleep(2_000_000_000)  # clock cycles
            for x, y in loader.epoch(1):
                step(x, y)
                read.append((x.clone(), y.clone()))
                if bench.cuda:
                    done.append(torch.cuda.current_stream(bench.device).record_event())
                    most = max(most, sum(not event.query() for event in done))
        if sum(len(x) for x, _ in read) != count:
            raise AssertionError(f"{case.study}: wrong number of samples in an epoch, expected {count}")
        for start, batch in zip(range(0, count, case.batch_size), read, strict=True):
            truth = [samples.read(1, index) for index in range(start, start + len(batch[0]))]
            for found, side in zip(batch, zip(*truth, strict=True), strict=True):
                wanted = np.stack(side)
                off = np.abs(found.cpu().numpy() - wanted) / (1 + np.abs(wanted))
                errors.hold(case.study, float(off.max()), DECODING)
    return {"tolerance": DECODING, "most batches ahead": most, **errors}


# --- rungs -------------------------------------------------------------------------------------------------------

#: Tolerances of a rung: (prediction and loss, gradients and weight update).
#:
#: In float32, rungs differ from the plain step only in the order of sums. The longest sum has 6 x 8^3 = 3072 terms, so
#: its relative error is about 2^-24 x sqrt(3072) / 2.5 = 1e-6. Convolutions by FFT or Winograd have 20 times this
#: error; TensorFloat-32 has errors of 2e-4 to 5e-4. An error may change the sign of one of the 12 x 2^3 x 6 = 576 units
#: of a layer, which changes a gradient by 1 / sqrt(576) = 0.04.
FP32 = 1e-4, 0.05
HALF = 0.004, 0.06  # fp16 has significands of 11 bits, as TensorFloat-32
BF16 = 0.02, 0.2  # significands of 8 bits; a few units per layer change sign
BOTH = UNET, VIT
#: Settings of the rung `fused`, and of other rungs that it is combined with.
FUSED: dict[str, Any] = {"optimizer": {"fused": True}}
OTHER_SETTINGS: dict[str, Any] = {
    "accumulation_steps": 2,
    "activation_checkpointing": True,
    "memory_format": "channels_last",
}
#: Settings of a rung, its tolerances, and the studies that have the rung.
Rung = tuple[dict[str, Any], tuple[float, float], tuple[Case, ...]]
RUNGS: dict[str, Rung] = {
    "tf32": ({"precision": "tf32"}, HALF, BOTH),
    "fp16": ({"precision": "fp16"}, HALF, BOTH),
    "bf16": ({"precision": "bf16"}, BF16, BOTH),
    "fp16_master": ({"precision": "fp16_master"}, HALF, BOTH),
    "bf16_master": ({"precision": "bf16_master"}, BF16, BOTH),
    "fused": (FUSED, FP32, BOTH),
    "channels_last": ({"memory_format": "channels_last"}, FP32, BOTH),
    "channels_last, bf16": ({"memory_format": "channels_last", "precision": "bf16"}, BF16, BOTH),
    "space_to_depth": ({"model": {"space_to_depth": True}}, FP32, (UNET,)),
    "accumulation 3": ({"accumulation_steps": 3}, FP32, BOTH),
    "checkpointing": ({"activation_checkpointing": True}, FP32, BOTH),
    "attention math": ({"attention": "math"}, FP32, (VIT,)),
    "attention efficient": ({"attention": "efficient"}, FP32, (VIT,)),
    "attention flash": ({"attention": "flash", "precision": "bf16"}, BF16, (VIT,)),
    "attention cudnn": ({"attention": "cudnn", "precision": "bf16"}, BF16, (VIT,)),
    "attention auto": ({"attention": "auto", "precision": "bf16"}, BF16, (VIT,)),
    "all but compile": ({**FUSED, **OTHER_SETTINGS, "precision": "bf16"}, BF16, BOTH),
}
COMPILED: dict[str, Rung] = {
    "compile, bf16": ({**FUSED, "compile": {"mode": "default"}, "precision": "bf16"}, BF16, BOTH),
}


def make(bench: Bench, case: Case, **over: Any) -> Step:
    """Return the step of a small case with plain SGD."""
    return case.step(bench.device, spread=0.1, **over | {"optimizer": SGD | over.get("optimizer", {})})


def observe(step: Step, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return prediction, loss, gradients and weight changes of one step, by name, in float32."""
    found = {"prediction": step.predict(x).clone()}
    step.gradients(x, y)
    scale = step.scaler.get_scale()
    for name, p in step.model.named_parameters():
        # the gradient of the keys' bias is zero, except for rounding
        if p.grad is not None and not name.endswith("attention.k.bias"):
            found[f"gradient of {name}"] = p.grad.float() / scale
    before = {name: value.clone() for name, value in step.weights.state_dict().items()}
    found["loss"] = step(x, y).clone()
    for name, value in step.weights.state_dict().items():
        if not name.endswith("attention.k.bias"):
            found[f"update of {name}"] = value - before[name]
    return found


def rung_equals_plain(bench: Bench, rung: Rung) -> Values:
    """Compare a rung's step with the plain float32 step, on a full batch and on a smaller batch."""
    over, (exact, loose), cases = rung
    errors = Errors()
    for case in cases:
        for size in (6, 5):
            plain = make(bench, case)
            x, y = case.batch(bench.device, size)
            # Keep targets far from predictions, because rounding would flip gradients at the kink of the L1 loss.
            y = plain.predict(x) + y + 0.2 * y.sign()
            # run the plain step first, because making the rung's step may switch TensorFloat-32 on in this process
            truth = observe(plain, x, y)
            try:
                step = make(bench, case, **over)
            except UserError as error:
                raise Skip(str(error)) from None
            found = observe(step, x, y)
            if found.keys() != truth.keys():
                raise AssertionError(
                    f"only one of the two steps has these gradients: {sorted(found.keys() ^ truth.keys())}"
                )
            for name, value in truth.items():
                kind, of, _ = name.partition(" of ")
                try:
                    errors.hold(kind, distance(found[name], value), loose if of else exact)
                except AssertionError as error:
                    raise AssertionError(f"{case.study}, batch of {size}, {name}: {error}") from None
    return {"tolerance": f"{exact:g}, {loose:g}", **errors}


# --- graphs ------------------------------------------------------------------------------------------------------

GRAPHS: dict[str, dict[str, Any]] = {
    "plain": {},
    "Adam": {"optimizer": {"kind": "adam", "lr": 1e-3, "fused": True}},
    "bf16, accumulation": {"precision": "bf16", "accumulation_steps": 2},
    "bf16_master, channels last": {"precision": "bf16_master", "memory_format": "channels_last"},
    "fp16": {"precision": "fp16"},
}
GRAPHS_COMPILED: dict[str, dict[str, Any]] = {"compile default": {"compile": {"mode": "default"}}}


def graph_equals_eager(bench: Bench, over: dict[str, Any]) -> Values:
    """Compare ten steps with CUDA graphs, some on smaller batches, with ten steps without graphs."""
    bench.need_cuda()
    errors = Errors()
    over = over if "optimizer" in over else {**over, **FUSED}
    for case in BOTH:
        optimizer = over["optimizer"] if "kind" in over["optimizer"] else SGD | over["optimizer"]
        eager, graphed = (
            case.step(bench.device, spread=0.1, **{**over, "optimizer": optimizer}, cuda_graph=graph)
            for graph in (False, True)
        )
        for number in range(10):
            x, y = case.batch(bench.device, 4 if number % 5 == 4 else 6, seed=number)
            for step in (eager, graphed):
                set_learning_rate(step.optimizer, 1e-3 * (number + 1))
            truth, loss = eager(x, y), graphed(x, y)
            errors.hold("loss", distance(loss, truth), 1e-3)
            x.fill_(float("nan"))  # overwrite the batch, as the loader does with its next batch
        weights = graphed.weights.state_dict()
        for name, value in eager.weights.state_dict().items():
            if not name.endswith("attention.k.bias"):
                # The order in which gradients are summed varies. For gradients near zero (1e-5 of all gradients), Adam
                # makes a full step of either sign. So the relative difference of weights may be 2 x 0.055 (sum of all
                # learning rates) x sqrt(1e-5) / 0.1 (spread of weights) = 0.003. A stale batch or rate would give 0.1.
                errors.hold("weights", distance(weights[name], value), 2e-2)
    return dict(errors)


def resume_with_graphs(bench: Bench) -> Values:
    """Compare steps after a restore with uninterrupted steps, all with CUDA graphs.

    The saved state is restored twice: into the same step and into a new step.
    """
    bench.need_cuda()
    errors = Errors()
    over: dict[str, Any] = {"optimizer": {"kind": "adam", "lr": 1e-3, "fused": True}, "cuda_graph": True}
    for case in BOTH:
        straight, first, second = (case.step(bench.device, spread=0.1, **over) for _ in range(3))
        batches = [case.batch(bench.device, seed=number) for number in range(12)]
        for x, y in batches[:6]:
            straight(x, y)
            first(x, y)
        saved = {name: shard.copy("cpu") for name, shard in first.shards().items()}
        scaler = first.scaler.state_dict()
        for x, y in batches[:3]:  # steps that the restore must undo
            first(x, y)
        for step in (first, second):
            step.load(saved, scaler)
        for x, y in batches[6:]:
            losses = [step(x, y) for step in (straight, first, second)]
            for name, loss in zip(("itself", "a new one"), losses[1:], strict=True):
                errors.hold(f"loss, into {name}", distance(loss, losses[0]), 1e-4)
    return dict(errors)


def no_wait(bench: Bench, over: dict[str, Any]) -> Values:
    """Check that neither a step nor the trainer's sum of losses waits for the device.

    PyTorch is set to raise if the host waits.
    """
    bench.need_cuda()
    for case in BOTH:
        step = case.step(bench.device, precision="bf16", optimizer={"fused": True}, **over)
        x, y = case.batch(bench.device)
        total = torch.zeros((), dtype=torch.float64, device=bench.device)

        def several(step: Step = step, x: torch.Tensor = x, y: torch.Tensor = y, total: torch.Tensor = total) -> None:
            for number in range(6):
                set_learning_rate(step.optimizer, 1e-4 * (number + 1))
                total += step(x, y) * len(x)

        several()
        torch.cuda.synchronize(bench.device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            several()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"steps": 6}


def mode_runs(bench: Bench, mode: str) -> Values:
    """Compare plain steps with steps in a compiler mode that captures its own CUDA graphs."""
    bench.need_cuda()
    errors = Errors()
    plain, step = make(bench, VIT), make(bench, VIT, compile={"mode": mode})
    for number in range(6):
        x, y = VIT.batch(bench.device, 4 if number == 3 else 6, seed=number)
        errors.hold("loss", distance(step(x, y), plain(x, y)), 1e-4)
    return dict(errors)


def compiled_equals_plain(bench: Bench, rung: Rung) -> Values:
    bench.need_cuda()  # `make bench` covers the CPU
    return rung_equals_plain(bench, rung)


def quick(bench: Bench) -> list[Task]:
    """Return the checks that take only seconds."""
    first = [
        Task("check", f"samples, {kind}", 20 if kind == "dali" else 3, partial(samples_equal, bench, kind))
        for kind in ("resident", "streamed", "dali")
    ]
    first += [Task("check", name, 2, partial(rung_equals_plain, bench, rung)) for name, rung in RUNGS.items()]
    first += [
        Task("check", f"CUDA graph, {name}", 3, partial(graph_equals_eager, bench, over))
        for name, over in GRAPHS.items()
    ]
    first.append(Task("check", "resumption with graphs", 3, partial(resume_with_graphs, bench)))
    first += [
        Task("check", f"no step waits{name}", 3, partial(no_wait, bench, over))
        for name, over in (("", {}), (", CUDA graph", {"cuda_graph": True}))
    ]
    return first


def ahead(bench: Bench) -> list[Task]:
    """Return the checks for batches that are overwritten too early; slow, because they keep the device busy."""
    return [
        Task("check", "samples ahead, streamed", 20, partial(samples_ahead, bench, "streamed", {})),
        Task(
            "check", "samples ahead, dali, CUDA graph", 20, partial(samples_ahead, bench, "dali", {"cuda_graph": True})
        ),
    ]


def slow(bench: Bench) -> list[Task]:
    """Return the checks that compile the model."""
    last = [Task("check", name, 30, partial(compiled_equals_plain, bench, rung)) for name, rung in COMPILED.items()]
    last += [
        Task("check", f"CUDA graph, {name}", 20, partial(graph_equals_eager, bench, over))
        for name, over in GRAPHS_COMPILED.items()
    ]
    return [*last, Task("check", "reduce-overhead", 20, partial(mode_runs, bench, "reduce-overhead"))]
