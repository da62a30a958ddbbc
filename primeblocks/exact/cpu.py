"""The `Kernels` of a CPU, which `batch_invariant()` uses unless you pass others."""

from .attention import attend
from .rows import grouped_matmul, log_softmax, matmul, softmax, total

__all__ = ["attend", "grouped_matmul", "log_softmax", "matmul", "softmax", "total"]
