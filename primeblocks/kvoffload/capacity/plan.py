"""The values of a capacity plan: memory of a GPU, sizes of weights, the plan itself."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import PlanError
from .kv_shapes import KvGroup

__all__ = ["CapacityPlan", "Gpu", "KvTier", "Recompute", "Weights"]


@dataclass(frozen=True)
class Gpu:
    """Memory of one GPU.

    Attributes:
        memory_bytes: all of it.
        memory_fraction: share that the engine may use, weights included.
        reserve_bytes: part of that share for activations, graphs and communication.

    Raises:
        PlanError: nothing is left.
    """

    memory_bytes: int
    memory_fraction: float = 0.9
    reserve_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        if not 0 < self.memory_fraction <= 1 or self.reserve_bytes < 0 or self.usable_bytes < 1:
            raise PlanError(
                f"{self.memory_bytes} bytes x {self.memory_fraction} - {self.reserve_bytes} leave "
                "nothing. memory_fraction is above 0 and at most 1; lower reserve_bytes."
            )

    @property
    def usable_bytes(self) -> int:
        """Bytes for weights and pages."""
        return int(self.memory_bytes * self.memory_fraction) - self.reserve_bytes


@dataclass(frozen=True)
class Weights:
    """Sizes of the weights, and the parameters that a token is multiplied with.

    Attributes:
        dense_bytes: all but routed experts: split over a replica's ranks, copied to every replica.
        expert_bytes: all routed experts together.
        experts: routed experts of a layer.
        spread_experts: deal whole experts to all GPUs; else a replica splits each of them.
        active_parameters: those that one token is multiplied with, for the cost of recomputing.

    Raises:
        PlanError: a number is negative, or experts and their bytes do not go together.
    """

    dense_bytes: int
    expert_bytes: int = 0
    experts: int = 0
    spread_experts: bool = False
    active_parameters: int = 0

    def __post_init__(self) -> None:
        numbers = (self.dense_bytes, self.expert_bytes, self.experts, self.active_parameters)
        if min(numbers) < 0 or (self.expert_bytes > 0) != (self.experts > 0):
            raise PlanError(f"expert_bytes needs experts, and nothing is negative; got {self}")

    def rank_bytes(self, *, tensor: int, data: int) -> int:
        """Return the bytes on the fullest GPU of `data` replicas of `tensor` ranks."""
        dense = -(-self.dense_bytes // tensor)
        if not self.spread_experts:
            return dense - (-self.expert_bytes // tensor)
        most = -(-self.experts // (tensor * data))
        return dense - (-self.expert_bytes * most // max(1, self.experts))


@dataclass(frozen=True)
class KvTier:
    """The load of one tier when every rollout is at its largest: whole prompts, all samples."""

    name: str
    rollouts: int
    used_bytes: int
    capacity_bytes: int


@dataclass(frozen=True)
class Recompute:
    """The cost of prefilling rollouts whose pages are gone, once each."""

    rollouts: int
    tokens: int
    flops: int

    def __add__(self, other: Recompute) -> Recompute:
        return Recompute(
            self.rollouts + other.rollouts, self.tokens + other.tokens, self.flops + other.flops
        )

    def __mul__(self, times: int) -> Recompute:
        return Recompute(self.rollouts * times, self.tokens * times, self.flops * times)


@dataclass(frozen=True)
class CapacityPlan:
    """The result of `plan_capacity`.

    Attributes:
        groups: layers with equal caches.
        gpus: number of GPUs.
        tensor: ranks of one replica of attention.
        page_tokens: tokens of a page.
        weight_bytes: weights on a GPU.
        kv_bytes: room for pages on a GPU.
        peak_bytes: the most that pages need on a GPU of the fullest replica.
        pages: pages of each group at that peak.
        tiers: GPU, host and disk with their loads.
        one_eviction: cost of recomputing the longest rollout, its shared prompt still there.
        left_over: cost of recomputing, once, every rollout that no tier has room for.
    """

    groups: tuple[KvGroup, ...]
    gpus: int
    tensor: int
    page_tokens: int
    weight_bytes: int
    kv_bytes: int
    peak_bytes: int
    pages: tuple[int, ...]
    tiers: tuple[KvTier, ...]
    one_eviction: Recompute
    left_over: Recompute

    def __repr__(self) -> str:
        verdict = "nothing is evicted" if self.fits else "rollouts are evicted"
        return (
            f"<CapacityPlan of {self.gpus} GPUs, {len(self.groups)} groups of layers, "
            f"{len(self.tiers)} tiers: {verdict}>"
        )

    @property
    def fits(self) -> bool:
        """Whether nothing is evicted from a GPU before it ends, in whatever order they grow."""
        return self.peak_bytes <= self.kv_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one more token in all layers, each head once; states do not grow."""
        return sum(each.token_bytes for each in self.groups)

    def table(self) -> str:
        """Format bytes by layer group, by GPU and by tier, then the cost of evictions."""
        lines = [
            f"{'group':<20}{'layers':>7}{'bytes/token':>13}{'page bytes/GPU':>16}{'pages':>10}"
        ]
        for group, pages in zip(self.groups, self.pages, strict=True):
            page = group.page_bytes(self.page_tokens, tensor=self.tensor)
            lines.append(
                f"{group.name:<20}{group.layers:>7}{group.token_bytes:>13}{page:>16}{pages:>10}"
            )
        verdict = "nothing is evicted" if self.fits else "rollouts are evicted"
        lines.append(f"{self.gpus} GPUs, {self.gpus // self.tensor} x {self.tensor}: {verdict}")
        sizes = {"weights": self.weight_bytes, "room": self.kv_bytes, "peak": self.peak_bytes}
        lines += [f"{name:<20}{size / 2**30:>12.2f} GiB a GPU" for name, size in sizes.items()]
        for tier in self.tiers:
            used, limit = tier.used_bytes / 2**30, tier.capacity_bytes / 2**30
            lines.append(
                f"{tier.name:<20}{used:>12.2f} of {limit:.2f} GiB, {tier.rollouts} rollouts"
            )
        again = {"evicting one": self.one_eviction, "left over": self.left_over}
        lines += [
            f"{name:<20}{cost.rollouts:>12} rollouts, {cost.tokens} tokens, {cost.flops:.3g} FLOPs"
            for name, cost in again.items()
        ]
        return "\n".join(lines)
