"""The sizes of the caches and recurrent states that rollouts need in attention layers.

`kv_groups` reads the layers of a model from its configuration, in groups with equal caches.
`footprint` returns the largest memory that the samples of one prompt can need on one rank.
`prefill_flops` counts the work of computing a rollout's cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import PlanError, UnsupportedError, check_counts, shown

__all__ = ["Footprint", "KvGroup", "Rollouts", "footprint", "kv_groups", "prefill_flops"]

_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
_DS_MLA = "fp8_ds_mla"
_MOST_LAYERS = 1 << 16  # Each is looked at.
# Keys of layers that change caches in ways not read here. None means that they change nothing.
_UNREAD = (
    "attention_chunk_size", "attn_layer_indices", "attn_layer_period", "block_configs",
    "block_types", "compress_ratios", "cross_attention_layers", "global_head_dim",
    "hybrid_override_pattern", "index_kpool", "is_heterogeneous", "layers_block_type",
    "mamba_d_ssm", "multi_query_group_num", "num_kv_shared_layers", "use_cla",
)  # fmt: skip
# These keys too, unless the other key is present.
_SPELLED = {
    "index_topk_freq": "indexer_types",
    "index_topk_pattern": "indexer_types",
    "linear_attn_config": "layer_types",
    "sliding_window_pattern": "layer_types",
    "max_window_layers": "layer_types",
    **dict.fromkeys(("full_attn_idxs", "hybrid_layer_pattern"), "layer_types"),
    "num_attention_groups": "num_key_value_heads",
    "v_head_dim": "kv_lora_rank",
}
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_INDEXED = "indexed_attention"  # latents with an indexer


@dataclass(frozen=True)
class KvGroup:
    """A group of layers with equal caches.

    Attributes:
        name: the group's name in a plan.
        layers: number of layers.
        head_bytes: bytes of the keys and values of one token, in one head of one layer.
        heads: number of key-value heads per layer. Tensor-parallel ranks divide the heads, or store
            copies if there are more ranks than heads. Latents and index keys have one head.
        window: number of tokens that a token sees, including itself. Pages before the window are
            freed. With `window=None`, a token sees all earlier tokens.
        state_head_bytes: bytes of a rollout's recurrent and convolution states, in one head of one
            layer.
        pair_flops: FLOPs of attention from one query to one key in one layer, over all heads.
        max_keys: with sparse attention, the maximum number of keys that a query attends to. The
            cache stores all keys.

    Raises:
        PlanError: a count is below 1, bytes are negative, or the group stores no bytes.
    """

    name: str
    layers: int
    head_bytes: int
    heads: int = 1
    window: int | None = None
    state_head_bytes: int = 0
    pair_flops: int = 0
    max_keys: int | None = None

    def __post_init__(self) -> None:
        limits = {"window": self.window, "max_keys": self.max_keys}
        told = {name: limit for name, limit in limits.items() if limit is not None}
        check_counts(layers=self.layers, heads=self.heads, **told)
        sizes = {"head_bytes": self.head_bytes, "state_head_bytes": self.state_head_bytes}
        check_counts(least=0, pair_flops=self.pair_flops, **sizes)
        if not self.head_bytes and not self.state_head_bytes:
            raise PlanError(f"group {self.name!r} stores no bytes. Leave it out.")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers and heads, with each head counted once."""
        return self.layers * self.heads * self.head_bytes

    def rank_heads(self, tensor: int) -> int:
        """Return the number of heads on each of `tensor` ranks.

        Raises:
            PlanError: `tensor` does not divide `heads` and is not a multiple of `heads`, or
                `tensor` is below 1.
        """
        check_counts(tensor=tensor)
        if self.heads % tensor and tensor % self.heads:
            fitting = [d for d in range(1, min(self.heads, 512) + 1) if self.heads % d == 0]
            raise PlanError(
                f"{self.heads} heads of {self.name!r} do not split over tensor={tensor}. "
                f"Use one of {fitting} or a multiple of {self.heads}."
            )
        return max(1, self.heads // tensor)

    def page_bytes(self, page_tokens: int, *, tensor: int = 1) -> int:
        """Return the bytes of a page in all layers, on one of `tensor` ranks."""
        return self.layers * self.rank_heads(tensor) * self.head_bytes * page_tokens

    def state_bytes(self, *, tensor: int = 1) -> int:
        """Return the bytes of a rollout's states in all layers, on one of `tensor` ranks."""
        return self.layers * self.rank_heads(tensor) * self.state_head_bytes


@dataclass(frozen=True)
class Rollouts:
    """Rollouts of one shape, all in flight at once.

    Attributes:
        prompts: number of different prompts.
        prompt_tokens: number of tokens in each prompt.
        completion_tokens: maximum number of tokens after the prompt in one rollout, over all turns.
        samples: number of rollouts per prompt. The rollouts of a prompt share the full pages of the
            prompt.

    Raises:
        PlanError: an attribute is below 1.
    """

    prompts: int
    prompt_tokens: int
    completion_tokens: int
    samples: int = 1

    def __post_init__(self) -> None:
        check_counts(prompts=self.prompts, samples=self.samples)
        check_counts(prompt_tokens=self.prompt_tokens, completion_tokens=self.completion_tokens)

    @property
    def tokens(self) -> int:
        """Tokens with keys and values: all except the last, which no later token attends to."""
        return self.prompt_tokens + self.completion_tokens - 1

    def shared_pages(self, page_tokens: int) -> int:
        """Return the number of full pages before the prompt's last token.

        Each sample computes the last token of its prompt separately.
        """
        return (self.prompt_tokens - 1) // page_tokens


class Footprint(NamedTuple):
    """The most that some samples can hold on one rank: pages by group, and bytes with states."""

    pages: tuple[int, ...]
    total_bytes: int


def kv_groups(config: Any, *, kv_dtype: str = "bfloat16") -> tuple[KvGroup, ...]:
    """Read the groups of layers from a configuration of transformers. Pure.

    The function reads multi-head and grouped-query attention, latents (`kv_lora_rank`), index keys
    of sparse attention (`index_head_dim`), sliding windows, gated delta networks and Kimi's delta
    attention (`layer_types`).

    Args:
        config: an object or a mapping, such as the content of config.json.
        kv_dtype: float32, bfloat16, float16, fp8, or `fp8_ds_mla`. With `fp8_ds_mla`, which is only
            for latents, a token has 512 bytes, four float32 scales and 64 unquantized bfloat16
            values. Pass `fp8_ds_mla` for a model with index keys on a Hopper GPU, because there
            vLLM stores fp8 latents in this format. Recurrent states of linear attention are
            float32. Convolution states of linear attention have `kv_dtype`, or bfloat16 if
            `kv_dtype` is quantized.

    Raises:
        PlanError: the configuration lacks a needed size, or a size is not a positive whole number.
        UnsupportedError: the configuration has layers that `kv_groups` cannot read, or `kv_dtype`
            is unknown or does not fit the model.
    """
    if (inner := _get(config, "text_config")) is not None:  # of a multimodal model
        config = inner
    _refuse_unknown(config)
    layers = _need(config, "num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise PlanError(f"num_hidden_layers must be at most {_MOST_LAYERS}; got {layers}.")
    if kv_dtype not in (*_SIZES, _DS_MLA):
        raise UnsupportedError(
            f"kv_dtype must be one of {', '.join(_SIZES)} and {_DS_MLA}; got {kv_dtype!r}."
        )
    latent = _may(config, "kv_lora_rank") is not None
    if kv_dtype == _DS_MLA and not latent:
        raise UnsupportedError(
            f"{_DS_MLA} stores latents, but this model does not have latents. Use fp8."
        )
    kinds = _layer_types(config, layers, known=(_FULL, _INDEXED if latent else _SLIDING, _LINEAR))
    groups: list[KvGroup] = []
    for kind, count in Counter(kinds).items():
        if kind == _LINEAR:
            groups.append(_delta_net(config, count, kv_dtype))
        elif latent:
            groups += _latents(config, [each == kind for each in kinds], kv_dtype)
        else:
            window = _need(config, "sliding_window") if kind == _SLIDING else None
            groups.append(_attention(config, kind, count, kv_dtype, window))
    return tuple(groups)


def _attention(config: Any, name: str, layers: int, kv_dtype: str, window: int | None) -> KvGroup:
    heads = _need(config, "num_attention_heads")
    width = _may(config, "head_dim") or _need(config, "hidden_size") // heads
    return KvGroup(
        name,
        layers,
        head_bytes=2 * width * _SIZES[kv_dtype],
        heads=_kv_heads(config, heads),
        window=window,
        pair_flops=4 * heads * width,
    )


def _kv_heads(config: Any, heads: int) -> int:
    if own := _may(config, "num_key_value_heads"):
        return own
    if _get(config, "new_decoder_architecture"):  # Falcon.
        return _need(config, "num_kv_heads")
    return 1 if _get(config, "multi_query") else heads


def _latents(config: Any, here: list[bool], kv_dtype: str) -> tuple[KvGroup, ...]:
    """Return the latent groups of the layers that `here` marks."""
    rank, rope = _need(config, "kv_lora_rank"), _need(config, "qk_rope_head_dim")
    heads, top = _need(config, "num_attention_heads"), _may(config, "index_topk")
    if kv_dtype == _DS_MLA:
        token = rank + rank // 128 * 4 + rope * 2
    else:
        token = (rank + rope) * _SIZES[kv_dtype]
    widths = 2 * rank + rope  # Kernels of sparse attention multiply the latents themselves.
    if not top:
        widths = _need(config, "qk_nope_head_dim") + rope + _need(config, "v_head_dim")
    flops = 2 * heads * widths
    latents = KvGroup("latents", sum(here), token, pair_flops=flops, max_keys=top)
    if not top:
        return (latents,)
    width = _need(config, "index_head_dim")
    kinds = _get(config, "indexer_types") or ["full"] * len(here)
    if not isinstance(kinds, Sequence) or len(kinds) != len(here):
        raise PlanError(f"indexer_types must name {len(here)} layers; got {shown(kinds)}.")
    own = [kind for kind, present in zip(kinds, here, strict=True) if present]
    # An FP8 key and a float32 scale for each 128 values, whatever the dtype of the latents.
    index = KvGroup(
        "index keys",
        own.count("full"),
        width + width // 128 * 4,
        pair_flops=2 * _need(config, "index_n_heads") * width,
    )
    return latents, index


def _delta_net(config: Any, layers: int, kv_dtype: str) -> KvGroup:
    if _may(config, "linear_num_heads"):  # Kimi's: as many keys as values, all of one width
        keys = values = _need(config, "linear_num_heads")
        key = value = _need(config, "linear_head_dim")
    else:
        keys, values = (_need(config, f"linear_num_{each}_heads") for each in ("key", "value"))
        key, value = (_need(config, f"linear_{each}_head_dim") for each in ("key", "value"))
    if values % keys:
        raise PlanError(f"{values} heads of values cannot share {keys} heads of keys equally.")
    each = values // keys
    kept = (2 * key + each * value) * (_need(config, "linear_conv_kernel_dim") - 1)
    recurrent = each * value * key * 4
    state = kept * max(2, _SIZES.get(kv_dtype, 1)) + recurrent
    return KvGroup(_LINEAR, layers, 0, heads=keys, state_head_bytes=state)


def _layer_types(config: Any, layers: int, *, known: tuple[str, ...]) -> list[str]:
    kinds = _get(config, "layer_types")
    every = _may(config, "full_attention_interval")
    if kinds is None and every:
        kinds = [_LINEAR if (at + 1) % every else _FULL for at in range(layers)]
    if kinds is None:
        windowed = (
            _may(config, "sliding_window") and _get(config, "use_sliding_window") is not False
        )
        kinds = [_SLIDING if windowed else _FULL] * layers
    if isinstance(kinds, str) or not isinstance(kinds, Sequence):
        raise PlanError(f"layer_types must be a list; got {shown(kinds)}.")
    unknown = {kind for kind in map(str, kinds) if kind not in known}
    if unknown or len(kinds) != layers:
        raise UnsupportedError(
            f"the configuration has {len(kinds)} layer_types for {layers} layers, and the unknown "
            f"types {sorted(unknown)}. Write KvGroup by hand."
        )
    return list(kinds)


def _refuse_unknown(config: Any) -> None:
    unread = [name for name in _UNREAD if _get(config, name)]
    if isinstance(config, Mapping) and config.get("per_layer_config"):  # An object always has it.
        unread.append("per_layer_config")
    plain = not _get(config, "layer_types")  # An object of a family with kinds of layers has it.
    falcon = ("multi_query", "new_decoder_architecture")
    odd = {
        "sliding_window": plain and "gemma" in str(_get(config, "model_type")),
        "attn_type_list": plain and len(set(_get(config, "attn_type_list") or ())) > 1,
        "num_kv_heads": _get(config, "num_key_value_heads") is None
        and all(_get(config, name) is None for name in falcon),
    }
    unread += [name for name, is_so in odd.items() if is_so and _get(config, name)]
    for name, spelled in _SPELLED.items():
        idle = name == "max_window_layers" and not _get(config, "use_sliding_window")
        if _get(config, name) and not _get(config, spelled) and not idle:
            unread.append(name)
    if unread:
        raise UnsupportedError(
            f"kv_groups cannot read {', '.join(unread)} in the configuration. Pass the "
            "configuration as transformers loads it, or write KvGroup by hand."
        )


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _need(config: Any, name: str) -> int:
    found = _may(config, name)
    if found is None:
        got = _get(config, name)
        raise PlanError(f"the configuration needs {name} of at least 1; got {shown(got)}.")
    return found


def _may(config: Any, name: str) -> int | None:
    """Read a count that may be absent. 0 also means absent."""
    found = _get(config, name)
    if found is None or found is False or found == 0:
        return None
    check_counts(**{f"{name} in the configuration": found})
    return int(found)


def footprint(
    groups: Sequence[KvGroup], rollouts: Rollouts, *, page_tokens: int, tensor: int = 1
) -> Footprint:
    """Return the peak over every order in which samples can grow, token by token. Pure.

    Samples after the first begin when the prompt is in its pages. Each may then have any length up
    to its end. Only lengths in the last page matter. A rollout one page shorter never holds more,
    because a window moves by whole pages and all other memory only grows. Two of these lengths
    suffice: the first, and the length that opens a page. Between the two, windows only free pages.
    """
    end = rollouts.tokens
    begin = 1 if rollouts.samples == 1 else rollouts.prompt_tokens
    begin = max(begin, end - page_tokens + 1)
    opened = -(-(begin - 1) // page_tokens) * page_tokens + 1
    lengths = {begin, min(opened, end)}
    sizes = [each.page_bytes(page_tokens, tensor=tensor) for each in groups]
    states = sum(each.state_bytes(tensor=tensor) for each in groups)

    def most(shared: int) -> tuple[int, tuple[int, ...]]:
        counted = (
            tuple(_held(each, tokens, page_tokens, shared) for each in groups) for tokens in lengths
        )
        return max((sum(map(int.__mul__, pages, sizes)), pages) for pages in counted)

    first, first_pages = most(0)
    each_other, other_pages = most(rollouts.shared_pages(page_tokens))
    others = rollouts.samples - 1
    return Footprint(
        pages=tuple(a + others * b for a, b in zip(first_pages, other_pages, strict=True)),
        total_bytes=first + others * each_other + rollouts.samples * states,
    )


def _held(group: KvGroup, tokens: int, page_tokens: int, shared: int) -> int:
    """Count pages of a rollout of this length that are not among the first `shared`."""
    if not group.head_bytes:
        return 0
    seen = 0 if group.window is None else max(0, tokens - group.window) // page_tokens
    return max(0, -(-tokens // page_tokens) - max(shared, seen))


def prefill_flops(
    groups: Sequence[KvGroup], *, start: int, end: int, active_parameters: int
) -> int:
    """Count a rollout's forward FLOPs of tokens `start` to `end` (exclusive), in closed form. Pure.

    Counts two FLOPs per active parameter and token, and attention to the keys that each token sees.
    Recurrent states are not counted. A model with states computes from token 0.
    """
    attention = 0
    for group in groups:
        seen = min(group.window or end, group.max_keys or end)
        keys = _keys_seen(end, seen) - _keys_seen(start, seen)
        attention += group.layers * group.pair_flops * keys
    return 2 * active_parameters * (end - start) + attention


def _keys_seen(tokens: int, most: int) -> int:
    """Return the sum of min(i, most) for i from 1 to `tokens`."""
    rising = min(tokens, most)
    return rising * (rising + 1) // 2 + (tokens - rising) * most
