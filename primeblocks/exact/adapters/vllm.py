"""vLLM with the trainer's own model: transformers' code inside of `batch_invariant()`.

Start the engine with `hf_overrides=ARCHITECTURE` and `enforce_eager=True`. The engine builds the
model as transformers does, without replacing layers. Attention reads keys from vLLM's pages, in the
same order as the trainer. The engine must run on a CPU, with one rank.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import PlanError, UnsupportedError, needs
from ..attention import attend
from ..invariant import batch_invariant

with needs("vllm", extra="vllm"):
    import vllm  # noqa: F401

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.interfaces_base import VllmModelForTextGeneration
from vllm.model_executor.models.transformers.base import Base
from vllm.model_executor.models.transformers.fusers import AttentionFuser
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.sample.sampler import Sampler

__all__ = [
    "ARCHITECTURE",
    "ExactForCausalLM",
    "PagedAttention",
    "PagedAttentionImpl",
    "PagedAttentionLayer",
]

ARCHITECTURE = {"architectures": ["PrimeblocksExactForCausalLM"]}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down|w1|w2|w3)(_proj)?\.weight")
_PARTS = {"w1": "gate", "w2": "down", "w3": "up"}
# Settings that change logits, and the values at which they do not.
_LOGITS = {
    "final_logit_softcapping": (None, 0),
    **dict.fromkeys(("logit_scale", "logits_scaling"), (None, 0, 1)),
    **dict.fromkeys(("lm_head_multiplier", "output_multiplier"), (None, 1)),
}


class PagedAttentionImpl(CPUAttentionBackendImpl):
    """Attention of one layer, over keys and values in vLLM's pages."""

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
            raise UnsupportedError(
                f"attention with {named[0]} has no batch-invariant form; use a model without it."
            )

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        blocks, heads, size, _ = kv_cache.shape
        key, value = kv_cache.view(blocks, heads, size * 2, -1).chunk(2, dim=2)
        return key, value

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
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
    """The attention backend through which vLLM finds `PagedAttentionImpl`."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PagedAttentionImpl]:
        return PagedAttentionImpl


class PagedAttentionLayer(Attention):
    """vLLM's attention layer, which switches off the torch modes of `batch_invariant()` in a call.

    `PagedAttentionImpl` does not need these modes, because it always computes in one order.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with _disable_current_modes():
            return super().forward(*args, **kwargs)


_plain_forward, _plain_logprobs = Sampler.forward, Sampler.compute_logprobs


def _sample(sampler: Sampler, *args: Any, **kwargs: Any) -> Any:
    """Run vLLM's sampler inside of `batch_invariant()`, because it computes log-probabilities."""
    with batch_invariant():
        return _plain_forward(sampler, *args, **kwargs)


def _logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Compute log-probabilities inside of `batch_invariant()`, also those of prompts."""
    with batch_invariant():
        return _plain_logprobs(logits)


def _refusal(config: Any) -> str | None:
    parallel, model = config.parallel_config, config.model_config
    text = model.hf_config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}  # Of all layers, or by their kind.
    reasons = {
        "it is not on a CPU; use vLLM's CPU build": not current_platform.is_cpu(),
        f"its {parallel.world_size} ranks add in another order; use one": parallel.world_size > 1,
        "its weights are quantized; load them as they are": config.quant_config is not None,
        "it compiles; set enforce_eager=True": not model.enforce_eager,
        "vLLM adds LoRA only to its own layers; send merged weights": config.lora_config
        is not None,
        "vLLM returns routes only of its own layers; leave out enable_return_routed_experts": (
            config.aux_output_config.enable_return_routed_experts
        ),
        "it drafts tokens; leave out speculative_config": config.speculative_config is not None,
        "its attention is latent; use a model with keys and values": model.use_mla,
        "its logits are scaled or capped; use another model": any(
            getattr(text, name, None) not in neutral for name, neutral in _LOGITS.items()
        ),
        "its rotary embedding depends on the longest row of a batch; use another model": any(
            each.get("rope_type") in {"dynamic", "longrope"}
            for each in (ropes, *ropes.values())
            if isinstance(each, dict)
        ),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


class ExactForCausalLM(VllmModelForTextGeneration, Base):
    """A causal language model of transformers, with the layers of the trainer's model."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        if reason := _refusal(vllm_config):
            raise UnsupportedError(f"this engine cannot be exact: {reason}.")
        super(VllmModelForTextGeneration, self).__init__(vllm_config=vllm_config, prefix=prefix)
        self.lm_head = nn.Linear(
            self.text_config.hidden_size, self.text_config.vocab_size, bias=False
        )
        self.lm_head.requires_grad_(False)
        # This changes every sampler of this process, because vLLM has no hook for it.
        setattr(Sampler, "forward", _sample)  # noqa: B010
        setattr(Sampler, "compute_logprobs", staticmethod(_logprobs))  # noqa: B010
        if self._get_tie_word_embeddings():
            self.lm_head.weight = self.model.get_input_embeddings().weight

    def _decorate_for_torch_compile(self) -> None:
        pass

    def recursive_replace(self) -> None:
        """Record the attention modules, without replacing modules."""
        for name, module in self.model.named_modules():
            fuser = AttentionFuser.match(None, module)
            if fuser is not None and (layer := fuser.layer_index(module)) is not None:
                self.attention_fusers[layer] = (f"model.{name}", fuser)

    def _get_attn_cls(self) -> Callable[..., Any]:
        return partial(PagedAttentionLayer, attn_backend=PagedAttention)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with batch_invariant():
            return super().forward(*args, **kwargs)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        with batch_invariant():
            return self.lm_head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load tensors by the names of a checkpoint, with experts one by one or stacked.

        Raises:
            PlanError: the model has no tensor with the name and the shape of a passed tensor.
        """
        held = {
            **dict(self.named_parameters(remove_duplicate=False)),
            **dict(self.named_buffers(remove_duplicate=False)),
        }
        loaded = set()
        for name, tensor in weights:
            target, expert, part = _place_of(name)
            if target not in held:
                # Not always, because the mapper drops layers that have the numbers of other layers.
                renamed = [each for each, _ in self.hf_to_vllm_mapper.apply([(name, tensor)])]
                if not renamed:
                    continue
                target, expert, part = _place_of(renamed[0])
            place = held[target].data if target in held else tensor[:0]
            if expert is not None and expert < len(place):
                place = place[expert] if part == "down" else place[expert].chunk(2)[part == "up"]
            if place.shape != tensor.shape:
                raise PlanError(
                    f"{name} of {tuple(tensor.shape)} has no place in this model, which has "
                    f"{tuple(held[target].shape) if target in held else 'no such name'}; give "
                    "tensors by the names and shapes of its checkpoint."
                )
            place.copy_(tensor)
            loaded.add(target)
        return loaded


def _place_of(name: str) -> tuple[str, int | None, str]:
    """Return the parameter that has a tensor, and of one expert the number and the part."""
    found = _EXPERT.fullmatch(name)
    if found is None:
        return name, None, ""
    part = _PARTS.get(found[3], found[3])
    return f"{found[1]}.{'down' if part == 'down' else 'gate_up'}_proj", int(found[2]), part
