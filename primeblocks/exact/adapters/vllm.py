"""vLLM with the trainer's own model: transformers' code inside of `batch_invariant()`.

An engine that is started with `hf_overrides=ARCHITECTURE` and `enforce_eager=True` builds the model
as transformers does, replaces no layer of it, and runs its attention over vLLM's pages of keys in
the order that the trainer has. On a CPU, of one rank.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.interfaces_base import VllmModelForTextGeneration
from vllm.model_executor.models.transformers.base import Base
from vllm.model_executor.models.transformers.fusers import AttentionFuser
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.sample.sampler import Sampler

from ...errors import UnsupportedError
from ..attention import attend
from ..invariant import batch_invariant

__all__ = ["ARCHITECTURE", "ExactForCausalLM", "PagedAttention", "PagedAttentionImpl"]

ARCHITECTURE = {"architectures": ["PrimeblocksExactForCausalLM"]}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class PagedAttentionImpl(CPUAttentionBackendImpl):
    """Attention of one layer: keys and values in vLLM's pages, as they are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        odd = {
            "a sliding window": self.sliding_window != -1,
            "ALiBi": self.alibi_slopes is not None,
            "a soft cap": bool(self.logits_soft_cap),
            "sinks": self.sinks is not None,
            f"a cache of {self.kv_cache_dtype}": self.kv_cache_dtype != "auto",
        }
        if named := [name for name, is_so in odd.items() if is_so]:
            raise UnsupportedError(f"attention with {named[0]} has no batch-invariant form.")

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        blocks, heads, size, _ = kv_cache.shape
        key, value = kv_cache.view(blocks, heads, size * 2, -1).chunk(2, dim=2)
        return key, value

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        with _disable_current_modes():
            slots = slot_mapping[: len(key)].long()
            kept = slots >= 0
            for cache, rows in zip(self._caches(kv_cache), (key, value), strict=True):
                block, at = slots[kept] // cache.shape[2], slots[kept] % cache.shape[2]
                cache[block, :, at] = rows[: len(slots)][kept]

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # A warm-up.
            return output
        with _disable_current_modes():
            keys, values = self._caches(kv_cache)
            starts = attn_metadata.query_start_loc.tolist()
            for at, seen in enumerate(attn_metadata.seq_lens.tolist()[: len(starts) - 1]):
                chosen = slice(starts[at], starts[at + 1])
                count = chosen.stop - chosen.start
                blocks = attn_metadata.block_table[at, : -(-seen // keys.shape[2])].long()
                output[chosen] = attend(
                    query[chosen],
                    *(each[blocks].transpose(1, 2).flatten(0, 1)[:seen] for each in (keys, values)),
                    positions=torch.arange(seen - count, seen),
                    scale=self.scale,
                )
        return output


class PagedAttention(CPUAttentionBackend):
    """vLLM's name for what `PagedAttentionImpl` does."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PagedAttentionImpl]:
        return PagedAttentionImpl


def _log_probabilities(logits: Tensor) -> Tensor:
    with batch_invariant():
        return logits.log_softmax(-1, dtype=torch.float32)


def _refusal(config: Any) -> str | None:
    parallel, model = config.parallel_config, config.model_config
    text = model.hf_config.get_text_config()
    reasons = {
        "several ranks add in another order": parallel.world_size > 1,
        "quantized weights have products of their own": config.quant_config is not None,
        "compiled code fuses operations: set enforce_eager=True": not model.enforce_eager,
        "adapters are added by vLLM's own kernels": config.lora_config is not None,
        "latent attention has no pages here": model.use_mla,
        "logits are scaled or capped": bool(
            getattr(text, "final_logit_softcapping", None) or getattr(text, "logit_scale", None)
        ),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


class ExactForCausalLM(VllmModelForTextGeneration, Base):
    """A causal language model of transformers, layer by layer as the trainer has it."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        if reason := _refusal(vllm_config):
            raise UnsupportedError(f"this engine cannot be exact: {reason}.")
        super(VllmModelForTextGeneration, self).__init__(vllm_config=vllm_config, prefix=prefix)
        self.lm_head = nn.Linear(
            self.text_config.hidden_size, self.text_config.vocab_size, bias=False
        )
        self.lm_head.requires_grad_(False)
        # Of the sampler of this process: vLLM has no hook for it.
        setattr(Sampler, "compute_logprobs", staticmethod(_log_probabilities))  # noqa: B010
        if self._get_tie_word_embeddings():
            self.lm_head.weight = self.model.get_input_embeddings().weight

    def _decorate_for_torch_compile(self) -> None:
        pass

    def recursive_replace(self) -> None:
        """Replace nothing; note where attention is."""
        for name, module in self.model.named_modules():
            fuser = AttentionFuser.match(None, module)
            if fuser is not None and (layer := fuser.layer_index(module)) is not None:
                self.attention_fusers[layer] = (f"model.{name}", fuser)

    def _get_attn_cls(self) -> Callable[..., Any]:
        return partial(Attention, attn_backend=PagedAttention)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with batch_invariant():
            return super().forward(*args, **kwargs)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        with batch_invariant():
            return self.lm_head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load tensors by the names of a checkpoint, experts one by one or stacked."""
        held = dict(self.named_parameters(remove_duplicate=False))
        loaded = set()
        for name, tensor in weights:
            found = _EXPERT.fullmatch(name)
            if found is None:
                target, place = name, held[name].data
            elif found[3] == "down":
                target = f"{found[1]}.down_proj"
                place = held[target].data[int(found[2])]
            else:
                target = f"{found[1]}.gate_up_proj"
                place = held[target].data[int(found[2])].chunk(2)[found[3] == "up"]
            place.copy_(tensor)
            loaded.add(target)
        return loaded
