"""Lossless deltas: only the elements that changed, and only their low bits."""

from .deltas import apply_delta, encode_delta

__all__ = ["apply_delta", "encode_delta"]
