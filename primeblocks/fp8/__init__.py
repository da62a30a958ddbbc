"""Block-scaled FP8 (E4M3) for training and for weight transfer.

Training and weight transfer use the same quantizer. Matrix products are differentiable, and run on
the kernel of the `Recipe`. `primeblocks.fp8.reference` defines the result of each product.
"""

from .audit import audit
from .checkpoint import encode_weights
from .matmul import grouped_matmul, matmul, swiglu_matmul
from .modules import Fp8Linear, WeightCache, convert
from .quantize import Quantized, Tile, measure_error, quantize
from .recipe import Gemm, Recipe

__all__ = [
    "Fp8Linear",
    "Gemm",
    "Quantized",
    "Recipe",
    "Tile",
    "WeightCache",
    "audit",
    "convert",
    "encode_weights",
    "grouped_matmul",
    "matmul",
    "measure_error",
    "quantize",
    "swiglu_matmul",
]
