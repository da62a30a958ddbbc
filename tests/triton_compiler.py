"""Triton kernels compiled for GPUs that are not here, and what the assembler says of them."""

import re
import subprocess
from pathlib import Path


def compiled(kernel, kinds, constants, *, target, warps, fusion=False):
    """Compile as a launch would: sizes, strides and addresses are multiples of 16.

    Arguments that are neither constants nor named in `kinds` are int32.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    kinds = {name: kinds.get(name, "i32") for name in names}
    kinds |= dict.fromkeys(constants, "constexpr")
    whole = [name not in constants and kinds[name] != "fp32" for name in names]
    multiples = {(i,): [["tt.divisibility", 16]] for i, one in enumerate(whole) if one}
    source = ASTSource(kernel, kinds, constants, multiples)
    options = {"num_warps": warps, "enable_fp_fusion": fusion}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def spilled_bytes(binary, folder):
    """Bytes of local memory a thread, as the assembler's own tool says."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    file = folder / "kernel.cubin"
    file.write_bytes(binary.asm["cubin"])
    command = [tool, "--dump-resource-usage", file]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))
