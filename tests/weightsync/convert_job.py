"""Run by test_convert_families.py in a process of its own: `convert_job.py FOLDER RANKS WHAT...`.

WHAT is FAMILY:tensors, or FAMILY:experts for ranks that have some experts in whole. Writes
FOLDER/<family>-<kind>-<rank>.safetensors: the parameters of vLLM's own model, as its loader left
them and before the CPU kernels packed them.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

TIMEOUT_S = 150.0


def engines(folder: Path, ranks: int, what: list[str]) -> None:
    import vllm
    from vllm.model_executor.model_loader import base_loader

    pack = base_loader.process_weights_after_loading
    loaded: dict[str, Any] = {}

    def keep_then_pack(model: Any, *arguments: Any) -> None:
        loaded.update({name: p.detach().clone() for name, p in model.named_parameters()})
        pack(model, *arguments)

    base_loader.process_weights_after_loading = keep_then_pack
    for family, kind in (each.split(":") for each in what):
        shared: dict[str, Any] = {
            "tensor_parallel_size": ranks,
            "enable_expert_parallel": kind == "experts",
            "distributed_executor_backend": "external_launcher",
        }
        loaded.clear()
        llm = vllm.LLM(
            str(folder / family),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=1,
            kv_cache_memory_bytes=1 << 20,
            skip_tokenizer_init=True,
            **(shared if ranks > 1 else {}),
        )
        rank = os.environ.get("RANK", "0")
        save_file(loaded, folder / f"{family}-{kind}-{rank}.safetensors")
        del llm


def start_ranks(ranks: int) -> None:
    """This script once a rank, in the environment that vLLM's external launcher expects."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    children = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + TIMEOUT_S
    try:
        codes = [child.wait(timeout=deadline - time.monotonic()) for child in children]
    finally:
        for child in children:
            child.kill()
    assert codes == [0] * ranks, codes


if __name__ == "__main__":
    if int(sys.argv[2]) > 1 and "RANK" not in os.environ:
        start_ranks(int(sys.argv[2]))
    else:
        engines(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
