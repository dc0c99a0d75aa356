"""Read weights from a file: the weights of another run, or published weights."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from dlscale.core.errors import UserError
from dlscale.core.files import no_pipe, sha256
from dlscale.core.text import many
from dlscale.train import checkpoint
from dlscale.train.precision import Weights

#: Keys under which other programs' checkpoints store the model's state dict.
PLACES = ("state_dict", "model_state", "model_state_dict", "model")
#: Prefixes that `torch.compile` and wrappers such as DDP add to names. `module.` may be the outer or the inner prefix.
PREFIXES = ("module.", "_orig_mod.", "module.")

State = dict[str, torch.Tensor]


def read_weights(path: str | Path) -> State:
    """Return the state dict in a file of `torch.save`, or in a checkpoint folder of dlscale; execute no code.

    The state dict may be nested in another program's checkpoint (`PLACES`), or come from a wrapped model (`PREFIXES`).
    """
    no_pipe(path, "a file of weights, or a checkpoint's folder")
    try:
        if Path(path).is_dir():
            return {name.removeprefix("model."): value for name, value in checkpoint.read(Path(path), "model.").items()}
        content = _load(path)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path}: no such file. Expected weights: a state dict that torch.save wrote") from None
    except (Exception, CheckpointException):
        # Reading a damaged pickle may raise exceptions of any type.
        raise UserError(
            f"{path}: not readable as weights: the file is damaged, or contains more than tensors and plain values. "
            "Expected a state dict that torch.save wrote"
        ) from None
    for place in PLACES:
        if isinstance(content, Mapping) and isinstance(content.get(place), Mapping):
            content = content[place]
            break
    if not (isinstance(content, Mapping) and content and all(isinstance(v, torch.Tensor) for v in content.values())):
        raise UserError(
            f"{path}: contains no weights. Expected a state dict, which maps names of the model's tensors to tensors"
        )
    state = {str(name): value for name, value in content.items()}
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def weights_digest(path: str | Path) -> str:
    """Return the SHA-256 of a file of weights, or of a checkpoint folder's `checkpoint.json`."""
    no_pipe(path, "a file of weights, or a checkpoint's folder")
    return sha256(Path(path) / "checkpoint.json" if Path(path).is_dir() else path)


def load_weights(weights: Weights, path: str | Path) -> None:
    """Load the weights of a file; raise `UserError` if names or shapes do not fit the model."""
    state, expected = read_weights(path), weights.state_dict()
    apart = []
    for names in weights.names().values():  # a tied tensor may have any of its names in the file
        if held := [state[name] for name in names if name in state]:
            state = dict.fromkeys(names, held[0]) | state
            if not all(torch.equal(value.float(), held[0].float()) for value in held[1:]):
                apart.append(" and ".join(names))
    # Files from before PyTorch 0.4.1 lack batch normalisation's counters; only layers with `momentum=None` use them.
    counters = {name: value for name, value in expected.items() if name.endswith("num_batches_tracked")}
    state = counters | state
    both = [name for name in expected if name in state]
    shapes = [
        f"{name} {list(state[name].shape)} in the file, {list(expected[name].shape)} in the model"
        for name in both
        if state[name].shape != expected[name].shape
    ]
    missing, foreign = [n for n in expected if n not in state], [n for n in state if n not in expected]
    wrong = [
        f"{what}: {', '.join(names[:3])}{' …' * (len(names) > 3)}"
        for what, names in (
            (f"{many(len(missing), 'tensor')} of the model that the file lacks", missing),
            (f"{many(len(foreign), 'tensor')} that the model lacks", foreign),
            ("other shapes", shapes),
            ("tied in the model, different in the file", apart),
        )
        if names
    ]
    if wrong:
        raise UserError(f"{path}: not the weights of this model; {'; '.join(wrong)}. Compare the run's `model`")
    weights.load_state_dict(state)


def _load(path: str | Path) -> Any:
    """Load a file of `torch.save` onto the host.

    Files since PyTorch 1.6 are zip archives, whose checksums are verified.
    """
    with open(path, "rb") as file:
        archive = file.read(4) == b"PK\x03\x04"  # torch.load tests the same bytes
    if archive:
        _check(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def _check(path: str | Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            # torch.load does not read an entry that is marked as a folder: its tensor would have uninitialised values.
            folders = [each.filename for each in archive.infolist() if each.external_attr & 0x10 and each.file_size]
            damaged = archive.testzip() or next(iter(folders), None)
    except (OSError, zipfile.BadZipFile):
        raise
    except Exception as error:  # a damaged header may name any compression, or require a password
        raise zipfile.BadZipFile(f"not readable: {error}") from None
    if damaged:
        raise zipfile.BadZipFile(f"{damaged}: changed after it was written")
