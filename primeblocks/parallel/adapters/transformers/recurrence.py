"""Recurrent layers of transformers over split sequences."""

from __future__ import annotations

from torch import nn

from .attention import Context

__all__ = ["install_recurrence"]


def install_recurrence(model: nn.Module, context: Context) -> None:
    """Hand the states of recurrent layers from rank to rank. Local."""
