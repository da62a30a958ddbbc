"""Images as vLLM takes them where their patches are made already, those that a trainer gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

from ....attachments import Aligned
from ....codec import lower
from ....errors import UsageError

__all__ = ["image_inputs"]

_FIELDS = ("pixel_values", "image_grid_thw")


def image_inputs(images: Sequence[Aligned], *, salt: str | None) -> dict[str, Any]:
    """Return what a prompt of ids says of its images; nothing without images. Local; copies.

    Args:
        salt: of the policy. vLLM keeps what the vision tower made of an image by the image's name
            alone, also when weights change, so the salt is a part of the name.

    Raises:
        UsageError: a value has other names than Qwen-VL's, or its parts do not fit together.
        UnsupportedError: a value is no array of numpy.
    """
    if not images:
        return {}
    ordered = sorted(images, key=lambda each: each.start)
    for each in ordered:
        _check(each)
    values = {
        name: torch.from_numpy(np.concatenate([each.value[name] for each in ordered]))
        for name in _FIELDS
    }
    sizes = values["image_grid_thw"].prod(-1)
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", sizes),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    places = [PlaceholderRange(offset=x.start, length=x.stop - x.start) for x in ordered]
    return {
        "type": "multimodal",
        "mm_kwargs": MultiModalKwargsItems.from_hf_inputs(values, fields),
        "mm_hashes": {"image": [_name(each.value, salt) for each in ordered]},
        "mm_placeholders": {"image": places},
    }


def _check(image: Aligned) -> None:
    value, tokens = image.value, image.stop - image.start
    if not isinstance(value, dict) or value.keys() != set(_FIELDS):
        named = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise UsageError(f"an image is a dict of {' and '.join(_FIELDS)}; got {named}")
    pixels, grid = (np.shape(value[name]) for name in _FIELDS)
    patches = int(np.prod(value["image_grid_thw"]))
    if grid != (1, 3) or len(pixels) != 2 or pixels[0] != patches or patches % tokens:
        raise UsageError(
            f"needs image_grid_thw [1, 3], pixel_values with a row for each of its patches, and as "
            f"many patches for each token; got {list(grid)}, {list(pixels)} and {tokens} tokens"
        )


def _name(value: dict[str, Any], salt: str | None) -> str:
    """Return a name of the contents, by which pages of the KV cache are found too."""
    header, buffers = lower([salt, value], name="an image")
    state = xxhash.xxh3_128(header)
    for each in buffers:
        state.update(each)
    return state.hexdigest()
