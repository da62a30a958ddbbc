"""The bytes that a training step sends, computed before anything is started."""

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
    """A model, and one rank's part of one micro-batch, in numbers.

    Attributes:
        tokens: of one rank.
        hidden: width of the rows that travel to experts.
        expert_layers: layers with experts.
        layers: layers with attention.
        head_dim: of queries, keys and values; their mean where they differ.
        root_parameters: outside of the layers, such as embedding and head.
        layer_parameters: of all layers, without their experts.
        expert_parameters: of all experts of all layers.
        parameter_bytes: of one gathered parameter.
        gradient_bytes: of one reduced gradient.
        activation_bytes: of one activation; sums of gradients travel in 4 at least.
        recompute: activation checkpointing runs the layers' forward twice.
        latent_dim: in latent attention, numbers of a token that travel for all heads, such as
            512 + 64; 0 where keys and values do.
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
    """Bytes that one rank receives from others in one micro-batch, as `plan_traffic` counts them.

    Attributes:
        rows: (axis, what, bytes).
    """

    rows: tuple[tuple[str, str, float], ...]

    @property
    def total_bytes(self) -> float:
        return sum(size for *_, size in self.rows)

    def of(self, axis: str) -> float:
        """Bytes over one axis."""
        return sum(size for name, _, size in self.rows if name == axis)

    def table(self) -> str:
        """Return one line an axis and purpose, in MiB."""
        lines = [f"{'axis':<12}{'MiB received':>14}  for"]
        lines += [f"{axis:<12}{size / 2**20:>14,.1f}  {what}" for axis, what, size in self.rows]
        lines.append(f"{'all':<12}{self.total_bytes / 2**20:>14,.1f}")
        return "\n".join(lines)


def plan_traffic(
    plan: MeshPlan, sizes: StepSizes, *, dispatch: str = "once_per_choice", attention: str = "ring"
) -> Traffic:
    """Say what forward and backward of one micro-batch send over each axis. Pure.

    Tokens are taken to choose experts evenly and sequences to be split evenly; checks and counts,
    a kilobyte a call, are left out.

    Args:
        dispatch: "once_per_choice" (`AllToAllDispatcher`) or "once_per_rank".
        attention: "ring" or "ulysses".

    Raises:
        PlanError: no plan or no sizes, another word, or experts that the expert degree does not
            divide.
    """
    if not isinstance(plan, MeshPlan):
        raise PlanError(f"plan must be a MeshPlan, as plan_mesh() returns; got {plan!r:.60}")
    if not isinstance(sizes, StepSizes):
        raise PlanError(
            f"sizes must be a StepSizes, as StepSizes(tokens=...) makes; got {sizes!r:.60}"
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
    """The part of something evenly spread that other ranks hold."""
    return (ranks - 1) / ranks


def _experts(plan: MeshPlan, sizes: StepSizes, dispatch: str) -> float:
    row, ranks = sizes.hidden * sizes.activation_bytes, plan.expert
    # There and back, forward and backward. What is recomputed ends where nothing is needed any
    # more: rows that were weighted by their owners do not come back a second time.
    passes = 4 + sizes.recompute * (2 if dispatch == "once_per_choice" else 1)
    if dispatch == "once_per_choice":
        each = passes * _far(ranks) * sizes.top_k * row
    else:
        share = sizes.num_experts // ranks
        nothing = comb(sizes.num_experts - share, sizes.top_k) / comb(
            sizes.num_experts, sizes.top_k
        )
        # Numbers and scores of the choices, and the gradients of the scores, in float32.
        choices = sizes.top_k * (8 * (1 + sizes.recompute) + 4)
        each = (ranks - 1) * (1 - nothing) * (passes * row + choices)
    return sizes.expert_layers * sizes.tokens * each


def _attention(plan: MeshPlan, sizes: StepSizes, attention: str) -> float:
    ranks, width, item = plan.context, sizes.head_dim, sizes.activation_bytes
    if attention == "ring":
        pair = sizes.latent_dim or 2 * sizes.key_heads * width
        forward = 2 + sizes.recompute
        # Keys and values come by again in backward; their gradients go all around.
        each = pair * ((ranks - 1) * forward * item + ranks * max(item, 4) * (ranks > 1))
        return sizes.layers * sizes.tokens * each
    heads = [range(sizes.heads * r // ranks, sizes.heads * (r + 1) // ranks)
             for r in range(ranks)]  # fmt: skip
    per_key = sizes.heads // sizes.key_heads
    keys = sum(len({head // per_key for head in part}) for part in heads) / ranks
    # A rank holds its heads of all tokens, and its tokens of all heads afterwards.
    queries = sizes.heads / ranks
    trip = (ranks - 1) * width * item
    exchanged = trip * 2 * queries * (2 + sizes.recompute)
    if sizes.latent_dim:  # Gathered forward, and their gradients summed backward.
        row = item * (1 + sizes.recompute) + max(item, 4)
        exchanged += (ranks - 1) * sizes.latent_dim * row
    else:
        exchanged += trip * 2 * keys * (2 + sizes.recompute)
    return sizes.layers * sizes.tokens * exchanged
