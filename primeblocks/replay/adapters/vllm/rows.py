"""Rows that vLLM returns, as `Routes`."""

import base64
import binascii
import re
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ....errors import CorruptionError, ShapeError, UnsupportedError, UsageError
from ...codec import Bytes
from ...routes import Routes
from .shape import RouterShape

__all__ = [
    "CompletionOutput",
    "join_prefill",
    "missing_rows",
    "read_npy",
    "routes_from_base64",
    "routes_from_output",
    "routes_from_rows",
]

# The header that numpy.save writes for integers in C order. numpy's own reader is not used, because
# it evaluates the header as Python, raises many errors, and allocates any size that the header has.
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00(?s:..)\{'descr': '([|<>][iu][1248])', 'fortran_order': False,"
    rb" 'shape': \((\d{1,18},|\d{1,18}(?:, \d{1,18}){1,7})\), \} *\n"
)


@runtime_checkable
class CompletionOutput(Protocol):
    """The part of vLLM's `CompletionOutput` that this adapter reads."""

    token_ids: Any
    routed_experts: np.ndarray | None


def routes_from_output(
    output: CompletionOutput, shape: RouterShape, *, prompt_tokens: int, prompt_start: int = 0
) -> Routes:
    """Read the routes of prompt and generated tokens from a finished `CompletionOutput`.

    The last sampled token is missing, because the model never read it. Prompt tokens before
    `prompt_start` (vLLM's `routed_experts_prompt_start`) are missing. Tokens whose rows the engine
    has dropped are missing too, because our plug-in fills these rows with 0xFF. A request aborted
    before its first token has no rows, so all its tokens are missing. Local. Copies the rows.

    Raises:
        UnsupportedError: the engine returned no rows for tokens that it generated.
        ShapeError: rows do not fit the tokens or the model.
        UsageError: a dense layer has routes, an id is out of range, or a row contains an expert
            twice. For example, torch.compile on a CPU makes every captured id 0.
    """
    tokens = prompt_tokens + len(output.token_ids)
    if output.routed_experts is not None:
        return routes_from_rows(
            output.routed_experts, shape, tokens=tokens, prompt_start=prompt_start
        )
    if len(output.token_ids):
        raise UnsupportedError(
            f"{len(output.token_ids)} generated tokens came without routed experts. Only a "
            "finished output has them, from an engine started with engine_args(...)."
        )
    nothing = np.zeros((0, len(shape.moe_layers), shape.top_k), shape.dtype)
    return _from_array(nothing, shape).with_missing(after=tokens)


def routes_from_base64(
    text: str, shape: RouterShape, *, tokens: int, prompt_start: int = 0
) -> Routes:
    """Read `choices[i].routed_experts` of vLLM's HTTP answers: a .npy file in base64.

    Args:
        tokens: the number of prompt and generated tokens together.

    Raises:
        CorruptionError: the text is not a .npy file in base64. Also raises the errors of
            `routes_from_output`.
    """
    try:
        file = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CorruptionError(
            f"{len(text)} characters of routed experts are not base64: {error}."
        ) from error
    return routes_from_rows(read_npy(file), shape, tokens=tokens, prompt_start=prompt_start)


def join_prefill(
    prefill: Routes,
    decode: Routes,
    *,
    prompt_tokens: int,
    versions: tuple[int, int],
    prompt_start: int = 0,
) -> Routes:
    """Join a prompt's routes from a prefill engine with the routes from a decode engine.

    If both engines know a row, the decode engine's row is kept, because later tokens attended to
    the keys and values of the decode engine. The decode engine computes the last token of the
    prompt again. Local. One copy.

    Args:
        prefill: routes of the prompt, with or without the unused token that the prefill engine
            sampled.
        decode: routes of prompt and completion, without the rows of tokens whose pages came from
            the prefill engine.
        versions: the version of the weights that computed the prompt, and the version that computed
            the first token of the completion.
        prompt_start: the index of the first token whose row was requested. Rows before
            `prompt_start` stay missing.

    Raises:
        UsageError: the two versions differ.
        ShapeError: `prefill` and `decode` belong to different prompts or models. Also raised if
            both lack the row of a token at or after `prompt_start`. The last token needs no row.
    """
    if versions[0] != versions[1]:
        raise UsageError(
            f"version {versions[0]} computed the prompt, and version {versions[1]} continued "
            "it, so no single policy has these routes. Send the request again, and update both "
            "engines together."
        )
    one_more = prefill.tokens in (prompt_tokens, prompt_tokens + 1)
    inside = 0 <= prompt_start <= prompt_tokens and 1 <= prompt_tokens <= decode.tokens
    if not inside or not one_more:
        raise ShapeError(
            f"for a prompt of {prompt_tokens} tokens, prefill must have {prompt_tokens} or "
            f"{prompt_tokens + 1} tokens, decode at least {prompt_tokens}, and prompt_start at "
            f"most {prompt_tokens}; got {prefill.tokens} and {decode.tokens} tokens, and "
            f"prompt_start {prompt_start}"
        )
    sent = prefill[:prompt_tokens].with_missing(after=decode.tokens - prompt_tokens)
    joined = decode.fill(sent)
    gap = prompt_start + np.flatnonzero(joined.missing[prompt_start:-1])
    if gap.size:
        raise ShapeError(
            f"{gap.size} of {joined.tokens - 1 - prompt_start} rows are known to neither engine. "
            f"The first is that of token {gap[0]}. Start both engines with engine_args(...), with "
            "room for their pages. `decode.fill` joins the known rows."
        )
    return joined


def read_npy(file: Bytes) -> np.ndarray:
    """Return the array in a .npy file as a view. Local.

    Raises:
        CorruptionError: the file is not a .npy file, or not in the form that vLLM writes.
    """
    head = bytes(file[: 1 << 10])
    found = _NPY.match(head)
    try:
        if found is None or found.end() != 10 + int.from_bytes(head[8:10], "little"):
            raise ValueError("the header does not describe integers in C order")
        dims = [int(size) for size in found[2].split(b",") if size]
        data = np.frombuffer(file, np.uint8, offset=found.end())
        return data.view(np.dtype(found[1].decode())).reshape(dims)
    except ValueError as error:
        raise CorruptionError(
            f"{len(file)} bytes of routed experts are not an .npy file: {error}."
        ) from error


def missing_rows(rows: np.ndarray) -> np.ndarray:
    """Bool `[tokens]`: True if every slot has the largest number, which marks a forgotten row."""
    forgotten: np.ndarray = (rows == np.iinfo(rows.dtype).max).all(axis=(1, 2))
    return forgotten


def routes_from_rows(
    rows: np.ndarray, shape: RouterShape, *, tokens: int, prompt_start: int
) -> Routes:
    """Check vLLM's rows, and return them as routes. Raises the errors of `routes_from_output`."""
    expected = (tokens - 1 - prompt_start, shape.num_layers, shape.top_k)
    if rows.shape != expected or rows.dtype != shape.dtype:
        raise ShapeError(
            f"{tokens} tokens from {prompt_start} on need routed experts {shape.dtype} "
            f"{list(expected)}; got {rows.dtype} {list(rows.shape)}. Check that the RouterShape "
            "is this model's, and prompt_start the request's."
        )
    forgotten = missing_rows(rows)
    dense = np.delete(rows, shape.moe_layers, axis=1)[~forgotten]
    if dense.any():
        layers = sorted(set(range(shape.num_layers)) - set(shape.moe_layers))
        routed = [layer for i, layer in enumerate(layers) if dense[:, i].any()]
        raise UsageError(f"layers {routed} have experts, but moe_layers is {shape.moe_layers}.")
    if len(shape.moe_layers) < shape.num_layers:
        rows = rows[:, shape.moe_layers]
    rows = np.pad(rows, ((prompt_start, 1), (0, 0), (0, 0)))
    return _from_array(rows, shape, np.pad(forgotten, (prompt_start, 1), constant_values=True))


def _from_array(rows: np.ndarray, shape: RouterShape, missing: np.ndarray | None = None) -> Routes:
    return Routes.from_array(
        rows, num_experts=shape.num_experts, layer_ids=shape.moe_layers, missing=missing
    )
