"""Kernels of our own for sparse attention, in Triton: never run on a GPU.

    dsa_attention(..., kernel=TritonSparseKernel(), scores=TritonIndexScores())

Rows of 576 columns of which 512 are the value, 64 or 128 heads, packed documents: what latent
attention needs. Tested in Triton's interpreter, and compiled for sm_90 without a GPU.
"""

from ....errors import MissingPackageError

try:
    from .index_scores import TritonIndexScores
    from .sparse_kernel import TritonSparseKernel
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    raise MissingPackageError("triton", "triton") from error

__all__ = ["TritonIndexScores", "TritonSparseKernel"]
