"""Batch-invariant computation on a CPU: a row has the same bits whatever else is in the batch.

When an engine samples a token, its batch has one row per running request. A trainer computes the
same token in a batch of thousands of rows. Kernels choose the order of their additions by the shape
of a batch. The last bits of log-probabilities therefore differ, and a policy gradient needs
importance ratios.

Inside `batch_invariant()`, every operation adds in one fixed order. An engine that runs the
trainer's model inside `batch_invariant()` (`adapters.vllm`) returns the trainer's log-probabilities
bit for bit. For other devices than a CPU, pass `Kernels` to `batch_invariant()`.
"""

from .attention import attend
from .invariant import batch_invariant
from .kernels import Kernels
from .trace import Difference, Trace, first_difference

__all__ = ["Difference", "Kernels", "Trace", "attend", "batch_invariant", "first_difference"]
