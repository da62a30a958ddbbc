"""Lossless deltas between two versions."""

from .tensors import DeltaInfo, apply_delta, encode_delta, inspect_delta, merge_deltas

__all__ = ["DeltaInfo", "apply_delta", "encode_delta", "inspect_delta", "merge_deltas"]
