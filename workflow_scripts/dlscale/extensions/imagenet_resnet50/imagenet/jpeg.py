"""Decoding of a part of a JPEG with nvImageCodec, which NVIDIA DALI installs.

Pillow always decodes all pixels. On a CPU, nvImageCodec uses the same library, libjpeg-turbo, and gets the same values.
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


def decode_box(file: np.ndarray, box: Box) -> np.ndarray | None:
    """Return the pixels of a box of a JPEG, RGB, uint8 [height, width, 3].

    Return None if nvImageCodec is missing, cannot decode `file`, uint8 [bytes], as a JPEG, or differs from Pillow: for
    one column, and for CMYK.
    """
    top, left, height, width = box
    # Other formats never reach nvImageCodec, because its parsers log errors about files that Pillow reads.
    if nvimgcodec is None or width < 2 or file[:2].tobytes() != b"\xff\xd8":
        return None
    stream = nvimgcodec.CodeStream(file)
    try:
        if stream.codec_name != "jpeg" or stream.num_channels > 3:
            return None
    except RuntimeError:  # a damaged JPEG
        return None
    region = stream.get_sub_code_stream(region=nvimgcodec.Region(top, left, top + height, left + width))
    # Each thread of each process has a decoder: decoders have threads, which do not survive a fork.
    decode, settings = _decoder(os.getpid(), threading.get_ident())
    decoded = decode(region, params=settings)
    return None if decoded is None else np.asarray(decoded.cpu())


@functools.cache
def _decoder(process: int, thread: int) -> tuple[Any, Any]:
    """Return a thread's function that decodes on the CPU, and its settings."""
    backends = [nvimgcodec.Backend(nvimgcodec.CPU_ONLY)]
    decoder = nvimgcodec.Decoder(nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY, max_num_cpu_threads=1, backends=backends)
    return decoder.decode, nvimgcodec.DecodeParams(apply_exif_orientation=False)  # as Pillow
