"""Lossless deltas between two versions."""

from .deltas import DeltaInfo, apply_delta, encode_delta, inspect_delta

__all__ = ["DeltaInfo", "apply_delta", "encode_delta", "inspect_delta"]
