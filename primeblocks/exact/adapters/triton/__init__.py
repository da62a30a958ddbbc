"""Triton kernels for `batch_invariant(kernels=)`, which have never run on a GPU.

The kernels run in Triton's interpreter, and compile for `sm_90` and `sm_100`. The kernels compute
in float32, round each result once, and have no gradients. The host does not wait for the kernels.
The order of additions depends only on the dtype, on the width of heads, and on the number of added
elements:

- Products have tiles of one size, without split-K and without tuning. A program adds the tiles of
  the inner dim from first to last.
- A sum over a row adds neighbouring elements, then neighbouring sums, and so on, as
  `batch_invariant()` does on a CPU. The kernel makes each addition explicitly, because the order of
  Triton's own sums depends on how elements are divided among threads. This division depends on the
  alignment of a row's address.
- Attention adds pages of keys in the order of positions. When a page raises the maximum of a
  query's scores, the sums of this query are rescaled. A key that a query does not see has a weight
  of zero. If a query sees no key of a page, the kernel multiplies the query's sums by one and adds
  zero, which changes no bit.
"""

from ....errors import needs

with needs("triton", extra="triton"):
    from .attention import attend
    from .products import grouped_matmul, matmul
    from .rows import log_softmax, softmax, total

__all__ = ["attend", "grouped_matmul", "log_softmax", "matmul", "softmax", "total"]
