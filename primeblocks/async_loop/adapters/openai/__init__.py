"""Servers as engines, through the `openai` client: token ids in; ids, log-probabilities out.

`generate` speaks the OpenAI protocol: the server takes ids on `/v1/completions` and answers with
ids. vLLM (run with 0.32) and newer SGLang (never run) do so for `return_token_ids`.
`generate_tokens` speaks vLLM's own, `/inference/v1/generate` (`--enable-scale-out`), in which every
token names the weights that sampled it. Start vLLM with `--logprobs-mode processed_logprobs`, or it
tells log-probabilities of another distribution than it sampled from, and with
`--generation-config vllm`, or the checkpoint's own sampling defaults apply.
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
