"""Batch-invariant computation on a CPU: a row has the same bits whatever else is in the batch.

An engine computes a token in a batch of one row, and a trainer in a batch of thousands. Kernels
choose the order of their additions by the shape of a batch. The last bits therefore differ, and a
policy gradient needs importance ratios.

Inside `batch_invariant()` every operation has one order. An engine that runs the same model inside
of it (`adapters.vllm`) returns the trainer's log-probabilities bit for bit. The mismatch is zero.
You may pass `Kernels` for other devices.
"""

from .attention import attend
from .invariant import batch_invariant
from .kernels import Kernels
from .trace import Difference, Trace, first_difference

__all__ = ["Difference", "Kernels", "Trace", "attend", "batch_invariant", "first_difference"]
