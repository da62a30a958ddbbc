"""Triton kernels compiled for GPUs that are not here, and what the assembler says of them."""

import importlib.util
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path


def compiled(kernel, kinds, constants, *, target, warps, fusion=False, aligned=True):
    """Compile as a launch would: sizes, strides and addresses are multiples of 16, if `aligned`.

    Arguments that are neither constants nor named in `kinds` are int32.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    kinds = {name: kinds.get(name, "i32") for name in names}
    kinds |= dict.fromkeys(constants, "constexpr")
    whole = [name not in constants and kinds[name] != "fp32" for name in names]
    whole = [i for i, one in enumerate(whole) if one and aligned]
    multiples = {(i,): [["tt.divisibility", 16]] for i in whole}
    source = ASTSource(kernel, kinds, constants, multiples)
    options = {"num_warps": warps, "enable_fp_fusion": fusion}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def spilled_bytes(binary, folder):
    """Bytes of local memory a thread, as the assembler's own tool says."""
    file = folder / "kernel.cubin"
    file.write_bytes(binary.asm["cubin"])
    command = [_tools() / "cuobjdump", "--dump-resource-usage", file]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))


def sass_by_assembler(binary):
    """Return the kernel's machine code by the version of ptxas: Triton's choice, and others.

    The others are those that lose bytes of codes, 12.8 and 12.9, in so far as they are installed:
    Triton's for older GPUs, and nvidia-cuda-nvcc-cu12's. They take the same PTX.
    """
    made = {"chosen": _disassembled(binary.asm["cubin"])}
    for version, ptxas in bad_assemblers().items():
        with tempfile.TemporaryDirectory() as folder:
            ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
            # The newest that 12.8 reads.
            ptx.write_text(re.sub(r"(?m)^\.version .*", ".version 8.7", binary.asm["ptx"]))
            gpu = re.search(r"^\.target (\w+)", binary.asm["ptx"], re.MULTILINE)[1]
            command = [ptxas, "--fmad=false", f"--gpu-name={gpu}", ptx, "-o", cubin]
            subprocess.run(command, capture_output=True, check=True)
            made[version] = _disassembled(cubin.read_bytes())
    return made


@cache
def bad_assemblers():
    """Return, by version, which of ptxas 12.8 and 12.9 are here."""
    tools = [_tools() / "ptxas", _tools() / "ptxas-blackwell"]
    if importlib.util.find_spec("nvidia.cuda_nvcc") is not None:
        nvcc = importlib.util.find_spec("nvidia.cuda_nvcc")
        tools.append(Path(next(iter(nvcc.submodule_search_locations))) / "bin" / "ptxas")
    found = {}
    for tool in tools:
        said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True)
        version = re.search(r"V(\d+\.\d+)", said.stdout)[1]
        if version in ("12.8", "12.9"):
            found[version] = tool
    return found


def _disassembled(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_tools() / "nvdisasm", "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _tools():
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
