"""Attention of transformers in which an indexer selects the tokens (DSA), over split sequences.

transformers passes the indices to a registered attention function, with queries per head. The
latents of keys and values come through `expand_kv`, which is replaced on the module. The indexer's
own code runs unchanged on a cache of this module, `_Cache`. In place of the keys, this cache
returns a `_Scores`, which records the operands of the scores. `_Scores.topk` calls `select`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ....errors import PlanError, ShapeError, UnsupportedError
from ....groups import agreed, outside_graphs
from ...attention.dsa import (
    IndexerInputs,
    Rows,
    SparseKernel,
    TopK,
    gather_tokens,
    select,
    sparse_attention,
)
from ...attention.dsa.indexer import IndexScores
from ...attention.inputs import autocast
from ...sequence import SequencePlan, check_plan
from .attention import has_hooks, sequence_of, use_attention

__all__ = ["IndexedAttention", "indexed_attentions", "install_indexed_attention", "scorers_of"]

_IMPLEMENTATION = "primeblocks_indexed"


@dataclass(frozen=True)
class IndexedAttention:
    """Kernels for models with an indexer, for the argument `attention=` of `parallelize`.

    Attributes:
        kernel: the kernel that computes attention to the selected tokens. Default:
            `ReferenceKernel()`.
        scores: the function that computes the scores of the indexer. Default: `index_scores`.
        check: as in `ring_attention`.
    """

    kernel: SparseKernel | None = None
    scores: IndexScores | None = None
    check: bool = True


def install_indexed_attention(
    model: nn.Module, engines: IndexedAttention, group: dist.ProcessGroup
) -> None:
    """Let every attention with an indexer select among the tokens of all ranks. Local.

    In a group of one rank, a call without a plan keeps the model's own attention.
    """
    AttentionInterface.register(_IMPLEMENTATION, _forward)
    AttentionMaskInterface.register(_IMPLEMENTATION, _stand_in_for_a_mask)
    attentions = indexed_attentions(model)
    # An indexer shares a configuration with the attention that calls it, but gets no plan.
    inside = {indexer for module in attentions if (indexer := module.indexer) is not None}
    use_attention(_IMPLEMENTATION, (m for m in model.modules() if m not in inside), group)
    for module in attentions:
        module.indexed_call = None
        module.expand_kv = partial(_keep_latents, module, module.expand_kv)
        module.register_forward_pre_hook(partial(_begin, engines, group), with_kwargs=True)
        # Also if the call ends in an error, or torch ends a recomputation early.
        module.register_forward_hook(_end, always_call=True)
        if module.indexer is not None:
            lend = partial(_lend_keys, module)
            module.indexer.register_forward_pre_hook(lend, with_kwargs=True)


def scorers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of indexers that transformers keeps in float32. Local."""
    indexers = [module.indexer for module in indexed_attentions(model)]
    return [indexer.weights_proj for indexer in indexers if indexer is not None]


def indexed_attentions(model: nn.Module) -> list[Any]:
    """Return the modules of attention that an indexer serves. Local."""
    # A layer that shares another layer's selection has an indexer of None.
    names = ("expand_kv", "indexer")
    return [m for m in model.modules() if all(hasattr(m, name) for name in names)]


@dataclass
class _Call:
    """One call of an attention module: the data that its parts exchange."""

    engines: IndexedAttention
    group: dist.ProcessGroup
    sequence: SequencePlan
    latents: Tensor | None = None
    """`[local_tokens, width]`, the latent, then the rotated part of the key."""
    whole: Tensor | None = None
    """The latents of all ranks, if an indexer gathered them."""


def _begin(
    engines: IndexedAttention,
    group: dist.ProcessGroup,
    module: Any,
    args: tuple[Any, ...],
    arguments: dict[str, Any],
) -> None:
    module.indexed_call = None
    if group.size() == 1 and arguments.get("sequence") is None:
        return
    hidden: Tensor = args[0] if args else arguments["hidden_states"]
    sequence = sequence_of(module, arguments, hidden.shape[0])
    if arguments.get("past_key_values") is not None:
        raise PlanError(
            "attention over split sequences does not support a cache. Pass use_cache=False."
        )
    module.indexed_call = _Call(engines, group, sequence)


def _end(module: Any, args: Any, output: Any) -> None:
    module.indexed_call = None


def _stand_in_for_a_mask(
    *sizes: Any, device: torch.device | None = None, **arguments: Any
) -> Tensor:
    """Return a tensor that attention can slice before it calls the indexer. It stays unread."""
    return torch.zeros(1, 1, 1, 1, device=device)


def _keep_latents(
    module: Any, own: Callable[..., tuple[Tensor, Tensor]], latents: Tensor, rotated: Tensor
) -> tuple[Tensor, Tensor]:
    """Replace `expand_kv`, so that latents travel instead of the keys and values of all heads."""
    call: _Call | None = module.indexed_call
    if call is None:
        return own(latents, rotated)
    kv = autocast(torch.cat([latents, rotated], dim=-1))  # Cast as attention would, but before.
    call.latents = kv[0, 0]
    return kv, kv


def _lend_keys(
    attention: Any, indexer: Any, args: tuple[Any, ...], arguments: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    call: _Call | None = attention.indexed_call
    if call is None:
        return None
    return args, arguments | {"past_key_values": _Cache(call)}


class _Cache:
    """The cache that an indexer asks for the keys of all tokens."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    def update_indexer(self, keys: Tensor, layer: int) -> _Scores:
        return _Scores(self._call, keys[0])


class _Chosen(NamedTuple):
    """The part of `torch.topk`'s result that an indexer reads."""

    indices: Tensor


# The operations of an indexer on keys, in order: products with queries, ReLU, sums over heads.
_STEPS = (torch.matmul, F.relu, torch.matmul)


class _Scores:
    """A stand-in for the scores of all tokens, on which an indexer's own code works.

    It does not compute these scores. It collects the operands of `_STEPS`, and passes them to
    `select`, which does not need a mask.
    """

    def __init__(self, call: _Call, keys: Tensor) -> None:
        self._call, self._keys = call, keys
        self._operands: list[Any] = []
        self._factor = 1.0

    def _itself(self, *arguments: Any, **named: Any) -> _Scores:
        return self

    # Positions of dims, dtypes and masks have no meaning here.
    transpose = unsqueeze = squeeze = float = masked_fill = __add__ = _itself

    def __mul__(self, factor: Any) -> _Scores:
        if not factor > 0:
            raise _unknown(f"multiplies scores by {factor}")
        self._factor *= factor
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> _Scores:
        found = args[-1] if function is torch.matmul else args[0]
        done = len(found._operands) if isinstance(found, _Scores) else len(_STEPS)
        if function not in _STEPS[done : done + 1]:
            raise _unknown(f"calls {getattr(function, '__name__', function)}")
        # ReLU's operand is `found` itself: a cycle would keep the latents of all ranks.
        found._operands.append(None if args[0] is found else args[0])
        return found

    @property
    def shape(self) -> tuple[int]:
        """A shape with the last dim only, because only that is read."""
        return (self._call.sequence.tokens,)

    def topk(self, k: int, dim: int = -1) -> _Chosen:
        """Select the tokens. Collective: see `_choose`."""
        if len(self._operands) < len(_STEPS):
            raise _unknown("selects before it has scores")
        q, _, weights = self._operands
        # The indexer widened queries for the product, but `select` needs the dtype of the keys.
        q = q[0].to(self._keys.dtype)
        inputs = IndexerInputs(q, self._keys, weights[0, :, 0] * self._factor)
        return _Chosen(_choose(self._call, inputs, k).transpose(0, 1))


@outside_graphs
def _choose(call: _Call, indexer: IndexerInputs, k: int) -> Tensor:
    """Gather the latents and the index keys of all ranks at once, and select. Collective."""
    assert call.latents is not None
    latents, sequence, group = call.latents, call.sequence, call.group
    with agreed("an indexer", latents, group=group, check=call.engines.check) as agreement:
        check_plan(sequence, group)
        rank = group.rank()
        tokens = sequence.counts[rank]
        if latents.shape[0] != tokens:
            raise ShapeError(
                f"the plan gives this rank {tokens} tokens, but the model was called with "
                f"{latents.shape[0]}. Pass local_inputs(tokens, sequence=plan, group=...)."
            )
        agreement.facts |= {
            "plan": sequence.fingerprint,
            "width of a latent": latents.shape[1],
            "latent dtype": latents.dtype,
            "width of an index key": indexer.k.shape[1],
            "index dtype": indexer.k.dtype,
        }
    call.whole, keys = gather_tokens(latents, indexer.k, sequence=sequence, group=group)
    return select(
        indexer, keys, selector=TopK(k), sequence=sequence, rank=rank, scores=call.engines.scores
    )


def _unknown(deed: str) -> UnsupportedError:
    return UnsupportedError(
        f"the indexer {deed}, but DeepSeek-V3.2 scores by weighted sums over heads of relu(q . "
        "k). This adapter was tested with transformers 5.19."
    )


def _forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    indices: Tensor,
    scaling: float,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Run attention as transformers calls it, on queries `[1, heads, tokens, head_dim]`.

    The key projection is absorbed into queries, and values are expanded from the sum of latents, so
    one row of latents serves all heads. `indices`, `[1, tokens, k]`, are the result of the indexer
    module, also if a hook replaced the result.
    """
    call: _Call = module.indexed_call
    if dropout:
        raise PlanError(
            f"attention over split sequences does not support dropout; got {dropout}. Use 0."
        )
    latent, rope = module.kv_lora_rank, module.qk_rope_head_dim
    matrix = _matrix(module.kv_b_proj).unflatten(0, (query.shape[1], -1))
    to_key, to_value = matrix.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
    plain, rotated = query[0].split([module.qk_nope_head_dim, rope], dim=-1)
    absorbed = torch.bmm(plain, to_key).transpose(0, 1)
    out = sparse_attention(
        torch.cat([absorbed, rotated.transpose(0, 1)], dim=-1),
        key[0, 0],
        indices.transpose(0, 1),
        sequence=call.sequence,
        group=call.group,
        rows=Rows.latent(latent, rope),
        scale=scaling,
        sinks=s_aux,
        whole=call.whole,
        kernel=call.engines.kernel,
        check=call.engines.check,
    )
    expanded = torch.bmm(out.transpose(0, 1), to_value.transpose(1, 2))
    return expanded.transpose(0, 1).unsqueeze(0), None


def _matrix(layer: nn.Module) -> Tensor:
    """Return the weight that stands for the whole layer. FSDP2 has gathered it."""
    hooks = has_hooks(layer)
    if type(layer) is not nn.Linear or "forward" in vars(layer) or hooks:
        raise UnsupportedError(
            f"kv_b_proj is a {type(layer).__name__}{' with hooks' if hooks else ''}. Attention "
            "over split sequences splits its weight, for keys and for values, and never calls "
            "it. Leave kv_b_proj a plain nn.Linear without hooks. Exclude it from LoRA's "
            "target_modules, and from fp8's rules (exclude='kv_b_proj')."
        )
    return layer.weight
