"""Decoding on a device, by the interpreted Triton kernel and by PyTorch's operations, compared with `BoxField.read`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dlscale.data.loaders import direct_loader
from dlscale.data.loaders.direct_loader import on_device
from dlscale.data.samples import BoxField
from tests.test_loaders import CPU, VOLUMES, crops, pairs

KERNEL = "dlscale.data.loaders.decode_kernel"


@pytest.fixture(params=["triton", "operations"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the name of the decoder: the Triton kernel or PyTorch's operations.

    If TRITON_INTERPRET is set before its import, Triton uses its interpreter instead of its compiler.
    """
    if request.param == "triton":
        pytest.importorskip("triton", reason="Triton is not installed: it comes with CUDA builds of PyTorch")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    else:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    forget()
    assert (direct_loader.kernel(CPU) is not None) == (request.param == "triton")
    yield request.param
    forget()


def forget() -> None:
    direct_loader.kernel.cache_clear()
    sys.modules.pop(KERNEL, None)


def held(field: BoxField, file: int) -> tuple[torch.Tensor, np.ndarray]:
    """Return all stored values of a file, and the strides of its axes [4]."""
    canonical = np.empty(field.shape_of(file), field.dtype)
    field.copy(file, np.zeros(3, np.int64), canonical)
    stored = np.ascontiguousarray(canonical.transpose(field.order))
    return torch.from_numpy(stored.reshape(-1)), field.strides(field.canonical(stored))


def truth(field: BoxField, starts: np.ndarray, symmetries: list[int]) -> torch.Tensor:
    boxes = [field.read(0, start, symmetry) for start, symmetry in zip(starts, symmetries, strict=True)]
    return torch.from_numpy(np.stack(boxes))


def decoded(field: BoxField, starts: np.ndarray, symmetries: list[int]) -> torch.Tensor:
    """Return decoded boxes of the first file."""
    stored, strides = held(field, 0)
    file, base = np.zeros(len(starts), np.int64), (starts * strides[1:]).sum(axis=1)
    return on_device(stored, field.plan(file, np.array(symmetries), base, strides[None]), field)


def starts_of(count: int, room: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, room, size=(count, 3))


@pytest.mark.parametrize("block", [64, 1024])
@pytest.mark.parametrize("name", ["published", "half, whole", "channels last, half, whole"])
def test_every_symmetry(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch, name: str, block: int) -> None:
    """Every symmetry is decoded exactly, for any block size of the kernel."""
    if way == "triton":
        monkeypatch.setattr(sys.modules[KERNEL], "BLOCK", block)
    samples = crops(tmp_path, VOLUMES[name], files=1)
    starts, symmetries = starts_of(48, (7, 5, 6)), list(range(48))
    assert torch.equal(decoded(samples.target, starts, symmetries), truth(samples.target, starts, symmetries))


def test_boxes_of_one_cell_and_of_unequal_edges(tmp_path: Path, way: str) -> None:
    """Boxes of one cell along an axis, and boxes with unequal edges, are decoded exactly."""
    samples = pairs(tmp_path, {"dtype": "float16"})
    starts = np.array([[time, 0, 0] for time in (5, 0, 6)])
    found = decoded(samples.input, starts, [0] * 3)
    assert found.shape == (3, 6, 4, 8)
    assert torch.equal(found, truth(samples.input, starts, [0] * 3))


def test_positions_beyond_32_bits(tmp_path: Path, way: str) -> None:
    """Positions beyond 32 bits are decoded exactly.

    The file has 2^33 stored values, and its channels are 2^31 values apart. The file is sparse and takes no memory.
    """
    field = crops(tmp_path, VOLUMES["half, whole"], files=1).input
    stored, strides = held(field, 0)
    apart, first = 2**31, 2**30 + 12345
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(2 * (3 * apart + 2**31))
    huge = np.memmap(tmp_path / "huge", np.float16, "r+")
    cells = stored.numpy().reshape(4, -1)
    for c in range(4):
        huge[first + c * apart :][: cells.shape[1]] = cells[c]
    starts = starts_of(3, (7, 5, 6))
    base = first + (starts * strides[1:]).sum(axis=1)
    plan = field.plan(np.zeros(3, np.int64), np.array([0, 14, 47]), base, np.array([[apart, *strides[1:]]]))
    assert torch.equal(on_device(torch.from_numpy(huge), plan, field), truth(field, starts, [0, 14, 47]))


@pytest.mark.parametrize("case", ["crop", "one time"])
def test_the_kernel_compiles_for_gpus(case: str) -> None:
    """The kernel compiles for A100 and H200, without such a GPU.

    The kernel writes 16 bytes at a time. It does not fuse multiply-adds, because fusing would change the rounding.
    Triton compiles another version for sizes of 1, such as a pair's number of times.
    """
    triton = pytest.importorskip("triton", reason="Triton is not installed: it comes with CUDA builds of PyTorch")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    forget()
    decode_kernel = importlib.import_module(KERNEL)
    types = {
        **{"stored": "*fp16", "places": "*i64", "numbers": "*fp32", "out": "*fp32"},
        **{"n0": "i32", "n1": "i32", "n2": "i32"},
    }
    constants = {"C": 5, "BLOCK": decode_kernel.BLOCK} | ({"n0": 1} if case == "one time" else {})
    names = decode_kernel._decode.arg_names
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        decode_kernel._decode,
        {name: signature[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name not in constants},
    )
    for capability in (80, 90):
        target = GPUTarget("cuda", capability, 32)
        text = triton.compile(source, target=target, options={"enable_fp_fusion": False}).asm["ptx"]
        stores = [line for line in text.splitlines() if "st.global" in line]
        assert stores and all("st.global.v4.b32" in line for line in stores)
        assert "fma" not in text
