"""Kernels that multiply and quantize, and hosts whose modules are converted.

Pass a kernel as `Recipe(gemm=...)`. On a GPU of compute capability 9.0 try them in this order:

    cublas.CublasGemm     torch alone. Dense products. Give it another kernel for experts.
    deep_gemm.DeepGemm    dense, and experts with rows padded to 128. Compiles at first use.
    triton.TritonGemm     dense, experts of any size, and float8 gradients of experts.
    ReferenceGemm         exact to the bit on any device, but slow. In `primeblocks.fp8.reference`.
"""
