"""Kernels of our own for sparse attention, in Triton, run on one H100.

    dsa_attention(..., kernel=TritonSparseKernel(), scores=TritonIndexScores())

Rows of 576 columns of which 512 are the value, 64 or 128 heads, packed documents: what latent
attention needs. Tested in Triton's interpreter, and compiled for sm_90 and sm_100.
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
