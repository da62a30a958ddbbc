"""Servers as engines, through the `openai` client. They take token ids and return ids and logprobs.

`generate` speaks the OpenAI protocol: the server takes ids on `/v1/completions` and returns ids.
Servers with `return_token_ids` do so: vLLM (run with 0.32) and newer SGLang (never run).

`generate_tokens` speaks vLLM's own protocol, `/inference/v1/generate` (`--enable-scale-out`). There
every token names the weights that sampled it.

Start vLLM with `--logprobs-mode processed_logprobs`. Otherwise its log-probabilities belong to
another distribution than the one it sampled from. Also pass `--generation-config vllm`, or the
checkpoint's own sampling defaults apply.
"""

from ....errors import MissingPackageError

try:
    import openai  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "openai":
        raise
    raise MissingPackageError("openai", "openai") from error

from .completions import generate, served_version
from .tokens import generate_split, generate_tokens

__all__ = ["generate", "generate_split", "generate_tokens", "served_version"]
