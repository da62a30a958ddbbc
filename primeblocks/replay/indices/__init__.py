"""Replay an engine's selection of attended positions: sparse attention with an indexer."""

from .values import Indices

__all__ = ["Indices"]
