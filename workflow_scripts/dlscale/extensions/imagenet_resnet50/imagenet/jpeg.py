"""Decoding of a part of a JPEG with nvImageCodec, which NVIDIA DALI installs.

Pillow always decodes all pixels. On a CPU, nvImageCodec uses the same library, libjpeg-turbo, and gets the same values.
Only a decoder of all pixels notices that a file is truncated, so Pillow decodes files that may be damaged.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

import numpy as np

from dlscale.extensions.imagenet_resnet50.imagenet.resize import Box

try:
    from nvidia import nvimgcodec
except ImportError:  # Pillow decodes all images
    nvimgcodec = None

#: Whether a byte may follow the byte 255 within compressed data: zero, and the restart markers.
INNER = np.isin(np.arange(256), [0, *range(0xD0, 0xD8)])


def is_complete(file: np.ndarray) -> bool:
    """Return whether a JPEG, uint8 [bytes], has its last marker; True for other formats."""
    return file[:2].tobytes() != b"\xff\xd8" or file[-2:].tobytes() == b"\xff\xd9"


def _is_plain(file: np.ndarray) -> bool:
    """Return whether a file is a complete JPEG with a single scan, and without markers inside its compressed data.

    Progressive JPEGs have several scans. Decoding only a part of a progressive JPEG saves no time, and gives other
    pixels than Pillow if a scan is missing.
    """
    if file[:2].tobytes() != b"\xff\xd8" or not is_complete(file):
        return False
    at = 2  # first byte of a segment: 255, marker, length in two bytes
    # The loop ends at the compressed data, or at the header of a progressive JPEG, which other markers follow.
    while at + 4 < len(file) and file[at] == 0xFF and file[at + 1] not in (0xDA, 0xC2):
        at += 2 + 256 * int(file[at + 2]) + int(file[at + 3])
    data = file[at + 2 :]
    return bool(INNER[data[1:-2][data[:-3] == 0xFF]].all())


def decode_box(file: np.ndarray, box: Box) -> np.ndarray | None:
    """Return the pixels of a box of a JPEG, RGB, uint8 [height, width, 3].

    Return None if nvImageCodec is missing, cannot decode `file`, uint8 [bytes], as a JPEG, or may differ from Pillow:
    for one column, for CMYK, for damaged files, and for progressive files.
    """
    top, left, height, width = box
    # Other formats never reach nvImageCodec, because its parsers log errors about files that Pillow reads.
    if nvimgcodec is None or width < 2 or not _is_plain(file):
        return None
    try:
        stream = nvimgcodec.CodeStream(file)
        if stream.codec_name != "jpeg" or stream.num_channels > 3:
            return None
        region = stream.get_sub_code_stream(region=nvimgcodec.Region(top, left, top + height, left + width))
        # Each thread of each process has a decoder: decoders have threads, which do not survive a fork.
        decode, settings = _decoder(os.getpid(), threading.get_ident())
        decoded = decode(region, params=settings)
        return None if decoded is None else np.asarray(decoded.cpu())
    except RuntimeError:  # a damaged JPEG, or a call of CUDA, which fails in a fork of a process that used a GPU
        return None


@functools.cache
def _decoder(process: int, thread: int) -> tuple[Any, Any]:
    """Return a thread's function that decodes on the CPU, and its settings."""
    backends = [nvimgcodec.Backend(nvimgcodec.CPU_ONLY)]
    decoder = nvimgcodec.Decoder(nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY, max_num_cpu_threads=1, backends=backends)
    return decoder.decode, nvimgcodec.DecodeParams(apply_exif_orientation=False)  # as Pillow
