"""Arguments that make vLLM return routes, and functions that read vLLM's answers as `Routes`.

Tested with vllm 0.32. This package does not import vLLM, so a trainer can read answers without
vLLM. On the CPU platform the engine needs our patch `routed_experts_on_cpu` (primeblocks.plugins).
"""

from .http import MEDIA_TYPE, Answer, RoutesMiddleware, read_answer
from .rows import CompletionOutput, join_prefill, routes_from_base64, routes_from_output
from .shape import RouterShape, engine_args, plan_capture_bytes, server_args

__all__ = [
    "MEDIA_TYPE",
    "Answer",
    "CompletionOutput",
    "RouterShape",
    "RoutesMiddleware",
    "engine_args",
    "join_prefill",
    "plan_capture_bytes",
    "read_answer",
    "routes_from_base64",
    "routes_from_output",
    "server_args",
]
