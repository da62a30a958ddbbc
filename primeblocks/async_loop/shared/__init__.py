"""A rollout buffer for several processes of one machine."""

from .buffer import SharedRolloutBuffer

__all__ = ["SharedRolloutBuffer"]
