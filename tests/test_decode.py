"""Decoding on a device, by the kernel (Triton interprets it) and by PyTorch's operations, against `BoxField.read`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlscale.data.loaders import direct_loader
from dlscale.data.loaders.base import AXES, Delivery, Share
from dlscale.data.loaders.direct_loader import on_device
from dlscale.data.samples import BoxField
from dlscale.train.step import Network
from tests.test_loaders import CPU, VOLUMES, build, crops, pairs, streamed

KERNEL = "dlscale.data.loaders.decode_kernel"
PLAIN = torch.contiguous_format
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
#: One for each permutation of axes, with all patterns of flips among them.
SOME = [0, 1, 5, 10, 14, 19, 23, 29, 36, 47]


@pytest.fixture(params=["triton", "operations"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Either way of decoding; Triton's interpreter takes the place of its compiler if it is asked for at import."""
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
    """Return all values of a file as they are stored, and their strides [4]."""
    canonical = np.empty(field.shape_of(file), field.dtype)
    field.copy(file, np.zeros(3, np.int64), canonical)
    stored = np.ascontiguousarray(canonical.transpose(field.order))
    return torch.from_numpy(stored.reshape(-1)), field.strides(field.canonical(stored))


def truth(field: BoxField, file: int, starts: np.ndarray, symmetries: list[int]) -> torch.Tensor:
    boxes = [field.read(file, start, symmetry) for start, symmetry in zip(starts, symmetries, strict=True)]
    return torch.from_numpy(np.stack(boxes))


def decoded(
    field: BoxField, starts: np.ndarray, symmetries: list[int], dtype: torch.dtype, layout: torch.memory_format
) -> torch.Tensor:
    """Decode boxes of the first file."""
    stored, strides = held(field, 0)
    file, base = np.zeros(len(starts), np.int64), (starts * strides[1:]).sum(axis=1)
    plan = field.plan(file, np.array(symmetries), base, strides[None])
    return on_device(stored, plan, field, dtype, Delivery(dtype, layout))


def rounded(values: torch.Tensor, dtype: torch.dtype, way: str) -> torch.Tensor:
    """Round to nearest; Triton's interpreter, but not its compiler, cuts bfloat16's digits off."""
    if way == "triton" and dtype == torch.bfloat16:
        values = (values.contiguous().view(torch.int32) & -(2**16)).view(torch.float32)
    return values.to(dtype)


def starts_of(count: int, room: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, room, size=(count, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["published", "channels last, half, whole"])
def test_every_symmetry(tmp_path: Path, way: str, name: str) -> None:
    """Bit by bit."""
    samples = crops(tmp_path, VOLUMES[name], files=1)
    starts, symmetries = starts_of(48, (7, 5, 6)), list(range(48))
    found = decoded(samples.target, starts, symmetries, torch.float32, torch.channels_last_3d)
    assert found.is_contiguous(memory_format=torch.channels_last_3d)
    assert torch.equal(found, truth(samples.target, 0, starts, symmetries))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [PLAIN, torch.channels_last_3d])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["half, whole", "channels last, half, whole"])
def test_every_form_of_crops(
    tmp_path: Path, way: str, name: str, dtype: torch.dtype, layout: torch.memory_format
) -> None:
    """Rounded once."""
    samples = crops(tmp_path, VOLUMES[name], files=1)
    starts, symmetries = starts_of(len(SOME), (7, 5, 6)), SOME
    found = decoded(samples.input, starts, symmetries, dtype, layout)
    assert found.is_contiguous(memory_format=layout) and found.dtype == dtype
    assert torch.equal(found, rounded(truth(samples.input, 0, starts, symmetries), dtype, way))


@pytest.mark.parametrize("layout", [PLAIN, torch.channels_last])
def test_every_form_of_states(tmp_path: Path, way: str, layout: torch.memory_format) -> None:
    """Boxes with an axis of one cell, and of unequal edges."""
    samples = pairs(tmp_path, {"dtype": "float16"})
    starts = np.array([[time, 0, 0] for time in (5, 0, 6)])
    found = decoded(samples.input, starts, [0] * 3, torch.float32, layout)
    assert found.shape == (3, 6, 4, 8) and found.is_contiguous(memory_format=layout)
    assert torch.equal(found, truth(samples.input, 0, starts, [0] * 3))


def test_positions_beyond_32_bits(tmp_path: Path, way: str) -> None:
    """Of 2^32 stored values (a file with a hole, which takes no memory), with channels 2^31 values apart."""
    samples = crops(tmp_path, VOLUMES["half, whole"], files=1)
    field = samples.input
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
    wide = np.array([[apart, *strides[1:]]])
    plan = field.plan(np.zeros(3, np.int64), np.array([0, 14, 47]), base, wide)
    found = on_device(torch.from_numpy(huge), plan, field, torch.float32, Delivery())
    assert torch.equal(found, truth(field, 0, starts, [0, 14, 47]))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["streamed", "resident"])
@pytest.mark.parametrize("make", [crops, pairs])
def test_loaders_deliver_what_the_step_takes(tmp_path: Path, way: str, make: Any, backend: str) -> None:
    """Of several files, a last batch without a sample of this rank among them; nothing is left to arrange."""
    samples = make(tmp_path, {"dtype": "float16"})
    axes = 1 + len(samples.input_spec.shape)
    network = Network(torch.nn.Identity(), torch.nn.MSELoss(), "bf16_pure", LAST[axes])
    delivery = network.delivery
    assert delivery == Delivery(torch.bfloat16, LAST[axes])
    share = Share(9, 0, 3)
    if backend == "streamed":
        loader: Any = streamed(samples, share, 0, delivery)
    else:
        loader = build("direct", samples, share, delivery=delivery, resident="always")
    for step, (x, y) in enumerate(loader.epoch(0)):
        truths = [samples.read(0, index) for index in share.indices(step, samples.size)]
        for values, number, dtype in ((x, 0, torch.bfloat16), (y, 1, torch.float32)):
            wanted = [rounded(torch.from_numpy(sample[number]), dtype, way) for sample in truths]
            spec = (samples.input_spec, samples.target_spec)[number]
            assert (values.shape, values.dtype) == ((len(wanted), *spec.shape), dtype)
            if wanted:
                assert torch.equal(values, torch.stack(wanted))
                assert network._arranged(values, dtype) is values
    loader.close()


@pytest.mark.parametrize("case", ["channels last", "contiguous", "one time"])
def test_the_kernel_compiles_for_gpus(case: str) -> None:
    """For A100 and H200, without one: values are written 16 bytes at a time, and multiply-adds keep their digits.

    Triton compiles anew where a size is 1, as that of a pair's times is.
    """
    triton = pytest.importorskip("triton", reason="Triton is not installed: it comes with CUDA builds of PyTorch")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    forget()
    decode_kernel = importlib.import_module(KERNEL)

    types = {"stored": "*fp16", "places": "*i64", "numbers": "*fp32", "n0": "i32", "n1": "i32", "n2": "i32"}
    constants = {"C": 5, "LAST": case == "channels last", "BLOCK": decode_kernel.BLOCK}
    constants |= {"n0": 1} if case == "one time" else {}
    names = decode_kernel._decode.arg_names
    for capability, out in ((80, "*bf16"), (90, "*fp32")):
        signature = {**types, "out": out, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(
            decode_kernel._decode,
            {name: signature[name] for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name not in constants},
        )
        options = {"enable_fp_fusion": False}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        stores = [line for line in compiled.asm["ptx"].splitlines() if "st.global" in line]
        assert stores and all("st.global.v4.b32" in line for line in stores)
        assert "fma" not in compiled.asm["ptx"]
        assert ("cvt.rn.bf16" in compiled.asm["ptx"]) == (out == "*bf16")


def test_layouts_have_axes() -> None:
    """A layout of volumes is none for labels."""
    assert {layout: axes for axes, layout in LAST.items()} == AXES
    delivery = Delivery(torch.bfloat16, torch.channels_last_3d)
    assert delivery.layout_of(5) == torch.channels_last_3d and delivery.layout_of(4) == delivery.layout_of(2) == PLAIN
