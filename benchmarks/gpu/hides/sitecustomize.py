"""Hides packages that a machine with a GPU lacks, from whoever has this folder in its path."""

import sys

LACKED = {
    *("vllm", "torchtitan", "beartype", "deep_ep", "deep_gemm", "openai", "starlette", "uvicorn"),
    *("mistral_common", "verifiers", "openenv", "trl", "verl", "lmcache", "nixl", "mooncake"),
}


class _Hides:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in LACKED:
            raise ModuleNotFoundError(f"{name} is hidden, as on a machine without it", name=name)


sys.meta_path.insert(0, _Hides)
