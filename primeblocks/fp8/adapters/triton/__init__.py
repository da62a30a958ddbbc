"""Triton kernels that quantize and multiply in float8. They have run on one H100.

    recipe = fp8.Recipe(gemm=TritonGemm(), quantizer=TritonQuantizer())

The quantizer, also with SwiGLU, gives the bits of `fp8.quantize`. Products agree with
`ReferenceGemm` to the precision of the tensor cores. Each call is one launch. The host waits only
for `nonfinite="raise"`. The kernels are tested in Triton's interpreter, and compiled for sm_90 and
sm_100.
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
