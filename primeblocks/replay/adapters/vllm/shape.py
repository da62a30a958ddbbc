"""The shape of a model's rows, the memory they need, and arguments that make vLLM return them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ....errors import UnsupportedError, UsageError, check_counts, shown

__all__ = ["RouterShape", "engine_args", "plan_capture_bytes", "server_args"]

# Names of lists that give the kind of each layer, and the kinds with experts in each list.
_LISTS = {
    "mlp_layer_types": ("sparse",),
    "layers_block_type": ("moe",),
    "hybrid_override_pattern": ("E",),
    "moe_layer_freq": (1, True),
}
_OFFSET = "expert_layer_offset"
_MOST_LAYERS = 1 << 16  # A limit, because each layer is looked at.


@dataclass(frozen=True)
class RouterShape:
    """The shape of a model's captured rows.

    Args:
        num_layers: the number of hidden layers. In vLLM's rows, dense layers have zeros.
        moe_layers: the indices of the layers with a router, ascending.
        num_experts: the number of routed experts in each layer with a router, without shared
            experts.
        top_k: experts per token.

    Raises:
        UsageError: a layer or a count is out of range.
    """

    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int

    @classmethod
    def from_config(cls, config: Any) -> RouterShape:
        """Read a model's configuration: an object of transformers, or the dict of a `config.json`.

        Local. For a model of several modalities, this method reads the configuration of the text
        model.

        Raises:
            UnsupportedError: the configuration lacks one of these numbers: experts, experts per
                token, layers. Also raised if this method cannot read which layers have routers.
            UsageError: `config` is not a configuration, or one of its layers or counts is out of
                range.
        """
        values = _text_values(config)
        num_experts = _first(values, "num_experts", "num_local_experts", "n_routed_experts")
        top_k = _first(values, "num_experts_per_tok", "num_experts_per_token")
        kinds = _kinds(values)
        num_layers = len(kinds) if kinds else _first(values, "num_hidden_layers")
        _check_counts(num_layers, num_experts, top_k)
        routing = [i for i in range(num_layers) if _routes(values, kinds, i)]
        return cls(num_layers, tuple(routing), num_experts, top_k)

    def __post_init__(self) -> None:
        _check_counts(self.num_layers, self.num_experts, self.top_k)
        layers, last = self.moe_layers, self.num_layers - 1
        whole = isinstance(layers, Sequence) and all(type(layer) is int for layer in layers)
        inside = whole and all(0 <= layer <= last for layer in layers)
        if not layers or not inside or list(layers) != sorted(set(layers)):
            raise UsageError(
                f"moe_layers must be ascending and between 0 and {last}; got {shown(layers)}."
            )
        if self.top_k > self.num_experts:
            raise UsageError(f"top_k must be in 1..{self.num_experts}; got {self.top_k}.")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of vLLM's rows and of `Routes`, which depends only on the number of experts."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.top_k * self.dtype.itemsize


def plan_capture_bytes(
    shape: RouterShape,
    *,
    page_tokens: int,
    device_pages: int,
    offloaded_pages: int = 0,
    slack: float = 2.0,
) -> int:
    """Return how many bytes of rows the engine must keep, so that every cached page has rows. Pure.

    vLLM keeps rows by page hash, in a store of the returned size. The store needs room for the rows
    of all cached pages, except pages in `kvoffload`, which stores rows with its pages. If the store
    has dropped the rows of a page, the plug-in's patch `missing_routes_survive` marks these rows as
    missing. Without the patch the *engine dies*.

    Args:
        page_tokens: the number of tokens in a KV page (vLLM's block size).
        device_pages: the number of pages of the engine's own KV cache.
        offloaded_pages: the number of pages of all tiers that do not store rows.
        slack: a factor for `offloaded_pages`, because tiers and store evict in different orders.
            With `offload_prompt_only=True`, pass at least 1 + (generated tokens / prompt tokens).

    Raises:
        UsageError: a count is not positive, or slack is below 1.
    """
    if page_tokens < 1 or device_pages < 1 or offloaded_pages < 0 or not slack >= 1:
        raise UsageError(
            "plan_capture_bytes needs page_tokens >= 1, device_pages >= 1, offloaded_pages >= 0 "
            f"and slack >= 1; got {page_tokens}, {device_pages}, {offloaded_pages} and {slack}."
        )
    pages = device_pages + math.ceil(offloaded_pages * slack)
    return pages * page_tokens * shape.bytes_per_token


def engine_args(*, max_bytes: int, device: Literal["cpu", "cuda"]) -> dict[str, Any]:
    """Return the keywords of `LLM` or `AsyncEngineArgs` that make the engine capture routes. Pure.

    On a CPU, the keywords include `enforce_eager=True`, because torch.compile makes every captured
    id 0.

    Args:
        max_bytes: the most bytes of rows that the engine keeps, from `plan_capture_bytes`.

    Raises:
        UsageError: `max_bytes` is not positive.
    """
    if max_bytes < 1:
        raise UsageError(f"max_bytes must be positive; got {max_bytes}. Use plan_capture_bytes.")
    args: dict[str, Any] = {
        "enable_return_routed_experts": True,
        "aux_output_config": {"max_bytes": max_bytes},
    }
    if device == "cpu":
        args["enforce_eager"] = True
    return args


def server_args(*, max_bytes: int, device: Literal["cpu", "cuda"]) -> list[str]:
    """Return `engine_args` as the command line of vLLM's server, with `RoutesMiddleware`. Pure.

    `server_args` has the same arguments and errors as `engine_args`.
    """
    words = []
    for name, value in engine_args(max_bytes=max_bytes, device=device).items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(json.dumps(value))
    return [*words, "--middleware", f"{__package__}.RoutesMiddleware"]


def _check_counts(num_layers: int, num_experts: int, top_k: int) -> None:
    check_counts(num_layers=num_layers, num_experts=num_experts, top_k=top_k)
    if num_layers > _MOST_LAYERS:
        raise UsageError(f"num_layers must be at most {_MOST_LAYERS}; got {num_layers}.")


def _text_values(config: Any) -> Mapping[str, Any]:
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    values = config.to_dict() if hasattr(config, "to_dict") else config
    for inner in (None, "thinker_config", "text_config"):
        values = values if inner is None else values.get(inner) or values
        if not isinstance(values, Mapping):
            what = "a configuration" if inner is None else inner
            raise UsageError(f"{what} must be of transformers, or a dict; got {shown(values)}.")
    return values


def _first(values: Mapping[str, Any], *names: str) -> int:
    for name in names:
        found = values.get(name)
        if isinstance(found, int) and not isinstance(found, bool):
            return found
    raise UnsupportedError(
        f"the configuration of {shown(values.get('model_type', 'a model'))} has none of"
        f" {list(names)}."
        " Pass RouterShape(num_layers=, moe_layers=, num_experts=, top_k=) yourself."
    )


def _kinds(values: Mapping[str, Any]) -> list[bool] | None:
    """Return whether each layer routes, or None if no list gives the kinds of layers."""
    for name, experts in _LISTS.items():
        listed = values.get(name)
        if isinstance(listed, Sequence) and listed:
            return [kind in experts for kind in listed]
    return None


def _routes(values: Mapping[str, Any], kinds: list[bool] | None, layer: int) -> bool:
    if kinds:
        return kinds[layer]
    if values.get("moe_layers") is not None:  # Llama 4 lists these layers.
        return layer in _layers(values, "moe_layers")
    dense = _count(values, "first_k_dense_replace", "num_dense_layers")
    every = _count(values, "decoder_sparse_step", "interleave_moe_layer_step") or 1
    freq = _count(values, "moe_layer_freq") or 1
    period, offset = _count(values, "expert_layer_period") or 1, _count(values, _OFFSET)
    regular = (layer + 1) % every == 0 and layer % freq == 0 and (layer - offset) % period == 0
    return layer >= dense and layer not in _layers(values, "mlp_only_layers") and regular


def _count(values: Mapping[str, Any], *names: str) -> int:
    """Read the first name that is present, or return 0."""
    for name in names:
        if (found := values.get(name)) and isinstance(found, int) and found is not True:
            return found
        if found:
            raise _unread(name, found)
    return 0


def _layers(values: Mapping[str, Any], name: str) -> Sequence[int]:
    listed = values.get(name) or ()
    if isinstance(listed, str | bytes) or not isinstance(listed, Sequence):
        raise _unread(name, listed)
    return listed


def _unread(name: str, found: Any) -> UnsupportedError:
    return UnsupportedError(
        f"{name} in the configuration is {shown(found)}, which this adapter cannot read. Pass "
        "RouterShape(num_layers=, moe_layers=, num_experts=, top_k=) yourself."
    )
