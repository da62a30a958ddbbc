"""Run by test_amx.py in its own process: `amx_job.py kernel` or `amx_job.py engine FOLDER`."""

import ctypes
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
import vllm

from primeblocks.errors import UnsupportedError
from primeblocks.testing import tiny_models


class _Stack(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


@contextmanager
def amx_withheld():
    """Linux grants no AMX while a thread's alternate signal stack cannot hold its registers."""
    libc, room = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(4096)
    small, none = _Stack(ctypes.addressof(room), 0, 4096), _Stack(None, 2, 0)
    assert libc.sigaltstack(ctypes.byref(small), None) == 0
    try:
        yield
    finally:
        assert libc.sigaltstack(ctypes.byref(none), None) == 0


def kernel() -> None:
    """One expert layer as vLLM runs it in bfloat16, without asking for AMX."""
    from vllm import _custom_ops as ops

    x = torch.ones(4, 32, dtype=torch.bfloat16)
    up = ops.cpu_prepack_moe_weight(torch.ones(2, 64, 32, dtype=x.dtype), "amx")
    down = ops.cpu_prepack_moe_weight(torch.ones(2, 32, 32, dtype=x.dtype), "amx")
    chosen = torch.zeros(4, 1, dtype=torch.int32)
    ops.cpu_fused_moe(
        torch.empty_like(x), x, up, down, None, None, torch.ones(4, 1), chosen, "silu", "amx"
    )


def engine(folder: Path) -> None:
    """An engine that uses nothing of ours, first without and then with AMX."""
    tiny_models.save("qwen3_moe", folder, seed=0, dtype="bfloat16", num_layers=2, hidden=64)

    def start() -> vllm.LLM:
        options = {"enforce_eager": True, "max_model_len": 256, "skip_tokenizer_init": True}
        options["kv_cache_memory_bytes"] = 64 << 20
        return vllm.LLM(str(folder), dtype="bfloat16", max_num_seqs=4, **options)

    try:
        with amx_withheld():
            start()
    except UnsupportedError as error:
        print(f"refused: {error}")
    sampling = vllm.SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
    (answer,) = start().generate([{"prompt_token_ids": [1, 5, 7]}], sampling, use_tqdm=False)
    print(f"tokens: {len(answer.outputs[0].token_ids)}")


if __name__ == "__main__":
    if sys.argv[1] == "kernel":
        kernel()
    else:
        engine(Path(sys.argv[2]))
