"""Small colour images kept as JPEG, decoded to pixels, whole or at half their size."""

from __future__ import annotations

import io
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray


def decoded(stream: NDArray[Any], offsets: NDArray[Any], side: int, *, halved: bool = False) -> NDArray[np.float64]:
    """Pixels in [0, 1], channels first: (n, 3 · s · s) float64, s = `side`, or half of it.

    Args:
        stream: all files one after the other, uint8.
        offsets: (n + 1,) file i is `stream[offsets[i]:offsets[i + 1]]`.
        side: pixels of a side; even where it is halved.
        halved: means of 2 × 2 pixels. They depend on the image and nothing else, as all features must.

    Raises:
        ValueError: offsets that do not rise from 0 to the stream's end, or an image of another size. The sentence tells
            nothing of an image.
        OSError: a file that is no image.
    """
    from PIL import Image

    places = np.asarray(offsets, dtype=np.int64)
    if (
        places.ndim != 1
        or len(places) < 1
        or places[0] != 0
        or places[-1] != len(stream)
        or (np.diff(places) < 1).any()
    ):
        raise ValueError("the offsets do not cut the stream of images into files")
    size = side // 2 if halved else side
    pixels = np.empty((len(places) - 1, 3, size, size))
    for row, (first, last) in zip(pixels, pairwise(places), strict=True):
        with Image.open(io.BytesIO(stream[first:last].tobytes()), formats=("JPEG",)) as image:
            if image.size != (side, side):
                raise ValueError(f"an image is not {side} × {side}")
            colours = np.asarray(image.convert("RGB"), dtype=np.float64).transpose(2, 0, 1)
        row[:] = colours.reshape(3, size, 2, size, 2).mean(axis=(2, 4)) if halved else colours
    pixels /= 255.0
    return pixels.reshape(len(pixels), -1)
