"""Engines that multiply and quantize, and hosts whose modules are converted.

Engines are passed in, `Recipe(gemm=...)`, and never found. On a GPU of compute capability 9.0 try
them in this order:

    cublas.CublasGemm     torch alone; dense products. For experts it is given another engine.
    deep_gemm.DeepGemm    dense, and experts whose rows are padded to 128; compiles when first used.
    triton.TritonGemm     dense, experts of any size, and float8 gradients of experts.
    ReferenceGemm         to the bit on any device, and slow; in `primeblocks.fp8.reference`.
"""
