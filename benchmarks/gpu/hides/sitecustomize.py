"""Hides packages that a machine with a GPU lacks, from whoever has this folder in its path."""

import sys

LACKED = {
    *("vllm", "torchtitan", "beartype", "deep_ep", "deep_gemm", "openai", "starlette", "uvicorn"),
    *("mistral_common", "verifiers", "openenv", "trl", "verl", "lmcache", "nixl", "mooncake"),
}


class _Without:
    """A finder that does not find some packages."""

    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in LACKED:
            return None
        return self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)


sys.meta_path[:] = [_Without(each) for each in sys.meta_path]
