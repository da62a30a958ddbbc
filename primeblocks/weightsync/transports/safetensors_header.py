"""The head of a safetensors file, so that other programs can read a committed version.

Format: 8 bytes of length, little-endian, then JSON: name -> dtype, shape, first and last byte.
Source: the safetensors format description, huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import struct
from math import prod

import torch

from ...errors import UnsupportedError
from ..plan import Plan

__all__ = ["header"]

_LENGTH = struct.Struct("<Q")
# The first tensor starts at a cache line.
_ALIGN = 64
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}


def header(plan: Plan) -> bytes:
    """Return the header that precedes the blob of a plan's whole tensors. Pure.

    Raises:
        UnsupportedError: the format has no name for a dtype.
    """
    rows = {}
    for name, spec in plan.target.items():
        if spec.dtype not in _DTYPES:
            raise UnsupportedError(
                f"{name!r} is {spec.dtype}, for which safetensors has no name. View it as uint8."
            )
        start = plan.offsets[name]
        end = start + prod(spec.shape) * spec.dtype.itemsize
        rows[name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(rows, separators=(",", ":")).encode()
    padding = -(_LENGTH.size + len(text)) % _ALIGN
    return _LENGTH.pack(len(text) + padding) + text + b" " * padding
