"""Triton kernels that quantize and multiply in float8, for use in a recipe:

    recipe = fp8.Recipe(gemm=TritonGemm(), quantizer=TritonQuantizer())

For the same input, the quantizer returns the same bits as `fp8.quantize`. If the quantizer also
computes a SwiGLU, equal SwiGLU results give equal bits. Products agree with `ReferenceGemm` to the
precision of the tensor cores. Each call launches one kernel. Only with `nonfinite="raise"`, a check
of the scales launches more kernels, and the host waits for the device. The kernels have run on one
H100, are tested in Triton's interpreter, and are compiled for sm_90 and sm_100.
"""

from ....errors import needs

with needs("triton", extra="triton"):
    from .gemm import TritonGemm
    from .quantize import TritonQuantizer

__all__ = ["TritonGemm", "TritonQuantizer"]
