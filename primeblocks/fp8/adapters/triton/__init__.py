"""Kernels of our own, in Triton, run on one H100.

    recipe = fp8.Recipe(gemm=TritonGemm(), quantizer=TritonQuantizer())

Quantizing, and SwiGLU with quantizing, have the bits of `fp8.quantize`; products agree with
`ReferenceGemm` to the precision of the tensor cores. Each is one launch, and no host waits. Tested
in Triton's interpreter, and compiled for sm_90 and sm_100.
"""

from ....errors import MissingPackageError

try:
    from .gemm import TritonGemm
    from .quantize import TritonQuantizer
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    raise MissingPackageError("triton", "triton") from error

__all__ = ["TritonGemm", "TritonQuantizer"]
