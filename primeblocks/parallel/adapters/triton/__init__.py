"""Triton kernels for sparse attention, which have run on one H100.

    dsa_attention(..., kernel=TritonSparseKernel(), scores=TritonIndexScores())

The kernels are written for latent attention over packed documents, with 64 or 128 heads and rows of
576 columns. The first 512 columns are the value. Tests run the kernels in Triton's interpreter, and
compile the kernels for `sm_90` and `sm_100`.
"""

from ....errors import needs

with needs("triton", extra="triton"):
    from .index_scores import TritonIndexScores
    from .sparse_kernel import TritonSparseKernel

__all__ = ["TritonIndexScores", "TritonSparseKernel"]
