"""Block-scaled FP8 (E4M3) for training and for weight transfer.

Holds one quantizer for both, matrix products with gradients over an engine that is passed in, and
a reference that says what each result is.
"""

from .formats import Tile
from .matmul import grouped_matmul, grouped_mm_fn, matmul
from .modules import Fp8Linear, convert, encode_weights
from .quantize import Quantized, measure_error, quantize, round_trip
from .recipe import Gemm, Recipe
from .reference import ReferenceGemm, exact_product

__all__ = [
    "Fp8Linear",
    "Gemm",
    "Quantized",
    "Recipe",
    "ReferenceGemm",
    "Tile",
    "convert",
    "encode_weights",
    "exact_product",
    "grouped_matmul",
    "grouped_mm_fn",
    "matmul",
    "measure_error",
    "quantize",
    "round_trip",
]
