"""The bytes that a rank receives in one micro-batch, computed before a process starts."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from ..errors import PlanError
from ..parallel import MeshPlan

__all__ = ["StepSizes", "Traffic", "plan_traffic"]

DISPATCHERS = ("once_per_choice", "once_per_rank")
ATTENTIONS = ("ring", "ulysses")


@dataclass(frozen=True)
class StepSizes:
    """The sizes of a model, and of one rank's part of one micro-batch.

    Attributes:
        tokens: number of tokens on one rank.
        hidden: width of the rows that are sent to experts.
        num_experts: number of routed experts per layer.
        top_k: number of experts per token.
        expert_layers: number of layers with experts.
        layers: number of layers with attention.
        heads: number of query heads.
        key_heads: number of key-value heads.
        head_dim: the head size of queries, keys and values, or the mean of different sizes.
        root_parameters: number of parameters outside of the layers, such as embedding and head.
        layer_parameters: number of parameters in all layers, without experts.
        expert_parameters: number of parameters in all experts of all layers.
        parameter_bytes: bytes per element of a parameter that FSDP gathers.
        gradient_bytes: bytes per element of a gradient that is summed over ranks.
        activation_bytes: bytes per element of an activation. If ranks sum gradients of keys,
            values or latents, the ranks send at least 4 bytes per element.
        recompute: True if activation checkpointing runs the layers' forward twice.
        latent_dim: with latent attention, how many values ranks send per token for all heads
            together, such as 512 + 64. Pass 0 if ranks send keys and values.
    """

    tokens: int
    hidden: int
    num_experts: int
    top_k: int
    expert_layers: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    root_parameters: int
    layer_parameters: int
    expert_parameters: int
    parameter_bytes: int = 2
    gradient_bytes: int = 4
    activation_bytes: int = 2
    recompute: bool = False
    latent_dim: int = 0


@dataclass(frozen=True)
class Traffic:
    """The result of `plan_traffic`: bytes that one rank receives in one micro-batch.

    Attributes:
        rows: (axis, purpose, bytes).
    """

    rows: tuple[tuple[str, str, float], ...]

    @property
    def total_bytes(self) -> float:
        return sum(size for *_, size in self.rows)

    def of(self, axis: str) -> float:
        """Return the bytes that are received over one axis."""
        return sum(size for name, _, size in self.rows if name == axis)

    def table(self) -> str:
        """Return one line per axis and purpose, in MiB."""
        lines = [f"{'axis':<12}{'MiB received':>14}  for"]
        lines += [f"{axis:<12}{size / 2**20:>14,.1f}  {what}" for axis, what, size in self.rows]
        lines.append(f"{'all':<12}{self.total_bytes / 2**20:>14,.1f}")
        return "\n".join(lines)


def plan_traffic(
    plan: MeshPlan, sizes: StepSizes, *, dispatch: str = "once_per_choice", attention: str = "ring"
) -> Traffic:
    """Compute the bytes that a rank receives over each axis in one micro-batch. Pure.

    The bytes of forward and backward are added. The formulas assume that tokens choose experts
    evenly and that sequences are split evenly. The result leaves out the exchanges of checks and
    counts, which send about a kilobyte per call.

    Args:
        dispatch: `"once_per_choice"` (`AllToAllDispatcher`) or `"once_per_rank"`
            (`OncePerRankDispatcher`).
        attention: "ring" or "ulysses".

    Raises:
        PlanError: `plan` or `sizes` has a wrong type, `dispatch` or `attention` is unknown, or the
            expert degree does not divide the experts.
    """
    if not isinstance(plan, MeshPlan):
        raise PlanError(f"plan must be a MeshPlan, as plan_mesh() returns; got {plan!r:.60}.")
    if not isinstance(sizes, StepSizes):
        raise PlanError(
            f"sizes must be a StepSizes, as StepSizes(tokens=...) makes; got {sizes!r:.60}."
        )
    if dispatch not in DISPATCHERS or attention not in ATTENTIONS:
        raise PlanError(
            f"dispatch must be one of {list(DISPATCHERS)} and attention one of "
            f"{list(ATTENTIONS)}; got {dispatch!r} and {attention!r}."
        )
    if sizes.num_experts % plan.expert:
        raise PlanError(f"expert={plan.expert} does not divide {sizes.num_experts} experts.")
    once, twice = "weights, forward", "weights, forward and backward"
    dense = sizes.root_parameters + sizes.layer_parameters
    own_experts = sizes.expert_parameters / plan.expert
    shards = dense / plan.fsdp + own_experts / plan.expert_fsdp
    gathered, reduced = sizes.parameter_bytes, sizes.gradient_bytes
    rows = [
        ("fsdp", once, _far(plan.fsdp) * sizes.root_parameters * gathered),
        ("fsdp", twice, 2 * _far(plan.fsdp) * sizes.layer_parameters * gathered),
        ("fsdp", "gradients", _far(plan.fsdp) * dense * reduced),
        ("expert_fsdp", twice, 2 * _far(plan.expert_fsdp) * own_experts * gathered),
        ("expert_fsdp", "gradients", _far(plan.expert_fsdp) * own_experts * reduced),
        ("replicate", "gradients", 2 * _far(plan.replicate) * shards * reduced),
        ("expert", "tokens to experts and back", _experts(plan, sizes, dispatch)),
        ("context", f"{attention} attention", _attention(plan, sizes, attention)),
    ]
    return Traffic(tuple(row for row in rows if row[2]))


def _far(ranks: int) -> float:
    """Return the part of evenly spread data that other ranks hold."""
    return (ranks - 1) / ranks


def _experts(plan: MeshPlan, sizes: StepSizes, dispatch: str) -> float:
    row, ranks = sizes.hidden * sizes.activation_bytes, plan.expert
    # To the experts and back, forward and backward. A recomputation ends early: rows that were
    # weighted by their owners do not return a second time.
    passes = 4 + sizes.recompute * (2 if dispatch == "once_per_choice" else 1)
    if dispatch == "once_per_choice":
        each = passes * _far(ranks) * sizes.top_k * row
    else:
        share = sizes.num_experts // ranks
        nothing = comb(sizes.num_experts - share, sizes.top_k) / comb(
            sizes.num_experts, sizes.top_k
        )
        # Ids and scores of the choices, and the gradients of the scores, in float32.
        choices = sizes.top_k * (8 * (1 + sizes.recompute) + 4)
        each = (ranks - 1) * (1 - nothing) * (passes * row + choices)
    return sizes.expert_layers * sizes.tokens * each


def _attention(plan: MeshPlan, sizes: StepSizes, attention: str) -> float:
    ranks, width, item = plan.context, sizes.head_dim, sizes.activation_bytes
    if attention == "ring":
        pair = sizes.latent_dim or 2 * sizes.key_heads * width
        forward = 2 + sizes.recompute
        # Keys and values travel again in backward. Their gradients go all around.
        each = pair * ((ranks - 1) * forward * item + ranks * max(item, 4) * (ranks > 1))
        return sizes.layers * sizes.tokens * each
    heads = [range(sizes.heads * r // ranks, sizes.heads * (r + 1) // ranks)
             for r in range(ranks)]  # fmt: skip
    per_key = sizes.heads // sizes.key_heads
    keys = sum(len({head // per_key for head in part}) for part in heads) / ranks
    # A rank first holds its heads of all tokens, and then its tokens of all heads.
    queries = sizes.heads / ranks
    trip = (ranks - 1) * width * item
    exchanged = trip * 2 * queries * (2 + sizes.recompute)
    if sizes.latent_dim:  # Gathered forward, and their gradients summed backward.
        row = item * (1 + sizes.recompute) + max(item, 4)
        exchanged += (ranks - 1) * sizes.latent_dim * row
    else:
        exchanged += trip * 2 * keys * (2 + sizes.recompute)
    return sizes.layers * sizes.tokens * exchanged
