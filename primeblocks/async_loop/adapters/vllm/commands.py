"""A deployment's command lines, read by vLLM's own parser."""

from __future__ import annotations

from typing import Any, NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.exceptions import VLLMClientError
from vllm.utils.argparse_utils import FlexibleArgumentParser

from ....errors import PlanError
from ...recipes import Deployment

__all__ = ["parse_commands"]


class _Parser(FlexibleArgumentParser):
    """Raises where vLLM's ends the process, as it does to give help, too."""

    def error(self, message: str) -> NoReturn:
        raise PlanError(f"vLLM's command line refuses this: {message}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise PlanError(f"vLLM's command line starts nothing, and exits with {status}")


def parse_commands(deployment: Deployment) -> tuple[AsyncEngineArgs, ...]:
    """Return what vLLM reads from the line of each engine, in their order. Local.

    `create_engine_config()` of each goes on to vLLM's configuration, which reads the model's own
    and asks what the machine has.

    Raises:
        PlanError: a flag or a value that vLLM does not take, or a file that it cannot read.
    """
    found = []
    for process in deployment.processes:
        if process.program[:2] != ("vllm", "serve"):
            continue
        try:
            parsed: Any = make_arg_parser(_Parser()).parse_args(process.words()[2:])
            validate_parsed_serve_args(parsed)
        except PlanError:
            raise
        except (OSError, TypeError, ValueError, VLLMClientError) as error:
            raise PlanError(f"vLLM's command line refuses this: {error}") from error
        parsed.model = parsed.model_tag
        found.append(AsyncEngineArgs.from_cli_args(parsed))
    return tuple(found)
