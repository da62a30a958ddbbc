"""The fewest GPUs for a batch of rollouts, the load of each tier, and the cost of evictions."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from numbers import Real

from ..errors import CapacityError, PlanError, check_counts, shown
from .kv_shapes import Footprint, KvGroup, Rollouts, footprint, kv_groups, prefill_flops

__all__ = [
    "CapacityPlan",
    "Gpu",
    "KvGroup",
    "KvTier",
    "Recompute",
    "Rollouts",
    "Weights",
    "kv_groups",
    "plan_capacity",
]

_LATENTS = ("latents", "index keys")  # Names that `kv_groups` gives.


@dataclass(frozen=True)
class Gpu:
    """Memory of one GPU.

    Attributes:
        memory_bytes: the whole memory.
        memory_fraction: the share of the memory that the engine may use, including weights.
        reserve_bytes: bytes of the engine's share that are reserved for activations, graphs and
            communication.

    Raises:
        PlanError: a number is out of range, or no memory remains for weights and pages.
    """

    memory_bytes: int
    memory_fraction: float = 0.9
    reserve_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        check_counts(least=0, memory_bytes=self.memory_bytes, reserve_bytes=self.reserve_bytes)
        fraction = self.memory_fraction
        if not isinstance(fraction, Real) or not 0 < fraction <= 1:
            raise PlanError(
                f"memory_fraction must be above 0 and at most 1; got {shown(fraction)}."
            )
        if self.usable_bytes < 1:
            raise PlanError(
                f"{self.memory_bytes} bytes x {fraction} - {self.reserve_bytes} leave no bytes "
                "for weights and pages. Lower reserve_bytes."
            )

    @property
    def usable_bytes(self) -> int:
        """Bytes that remain for weights and pages."""
        return int(self.memory_bytes * self.memory_fraction) - self.reserve_bytes


@dataclass(frozen=True)
class Weights:
    """Sizes of the weights, and the number of parameters in the matrix products of each token.

    Attributes:
        dense_bytes: bytes of all weights except routed experts. Every replica stores a full copy of
            dense weights, split over its ranks.
        expert_bytes: bytes of all routed experts together.
        experts: number of routed experts per layer.
        spread_experts: distribute whole experts over all GPUs. With `spread_experts=False`, every
            replica splits each expert over its ranks.
        active_parameters: number of parameters in the matrix products of each token, for the cost
            of recomputing.

    Raises:
        PlanError: a number is negative, or only one of `experts` and `expert_bytes` is above 0.
    """

    dense_bytes: int
    expert_bytes: int = 0
    experts: int = 0
    spread_experts: bool = False
    active_parameters: int = 0

    def __post_init__(self) -> None:
        sizes = {"dense_bytes": self.dense_bytes, "expert_bytes": self.expert_bytes}
        check_counts(
            least=0, experts=self.experts, active_parameters=self.active_parameters, **sizes
        )
        if (self.expert_bytes > 0) != (self.experts > 0):
            raise PlanError(f"expert_bytes needs experts, and experts need bytes; got {self}.")

    def rank_bytes(self, *, tensor: int, data: int) -> int:
        """Return the bytes of weights on the fullest GPU, for `data` replicas of `tensor` ranks.

        Raises:
            PlanError: `tensor` or `data` is below 1.
        """
        check_counts(tensor=tensor, data=data)
        dense = -(-self.dense_bytes // tensor)
        if not self.spread_experts:
            return dense - (-self.expert_bytes // tensor)
        most = -(-self.experts // (tensor * data))
        return dense - (-self.expert_bytes * most // max(1, self.experts))


@dataclass(frozen=True)
class KvTier:
    """The load of a tier if all rollouts have their maximum size. No prompt is split over tiers."""

    name: str
    rollouts: int
    used_bytes: int
    capacity_bytes: int


@dataclass(frozen=True)
class Recompute:
    """The cost of recomputing each evicted rollout once."""

    rollouts: int
    tokens: int
    flops: int


@dataclass(frozen=True)
class CapacityPlan:
    """The result of `plan_capacity`.

    Attributes:
        groups: groups of layers with equal caches.
        gpus: number of GPUs.
        tensor: number of ranks in one replica of the attention layers.
        page_tokens: number of tokens in a page.
        weight_bytes: bytes of weights on the fullest GPU.
        kv_bytes: bytes of room for pages on each GPU.
        peak_bytes: the maximum bytes that pages need on a GPU of the fullest replica.
        pages: number of pages of each group at the peak.
        tiers: the loads of GPU, host and disk.
        left_over: the cost if each rollout that does not fit in any tier is recomputed once.
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
    left_over: Recompute

    def __repr__(self) -> str:
        verdict = "nothing is evicted" if self.fits else "rollouts are evicted"
        return (
            f"<CapacityPlan of {self.gpus} GPUs, {len(self.groups)} groups of layers, "
            f"{len(self.tiers)} tiers: {verdict}>"
        )

    @property
    def fits(self) -> bool:
        """Whether all rollouts stay on their GPUs until they end, for every order of growth."""
        return self.peak_bytes <= self.kv_bytes

    def table(self) -> str:
        """Return bytes by layer group, by GPU and by tier, then the cost of recomputation."""
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
        left = self.left_over
        cost = f"{left.rollouts:>12} rollouts, {left.tokens} tokens, {left.flops:.3g} FLOPs"
        return "\n".join([*lines, f"{'left over':<20}{cost}"])


def plan_capacity(
    groups: Sequence[KvGroup],
    rollouts: Sequence[Rollouts],
    *,
    gpu: Gpu,
    weights: Weights,
    tensor: int = 1,
    gpus: int | None = None,
    page_tokens: int = 16,
    host_bytes: int = 0,
    disk_bytes: int = 0,
) -> CapacityPlan:
    """Plan the memory of rollouts that are all in flight at once. Pure.

    The GPUs form replicas of the attention layers with `tensor` ranks each. Prompts with all their
    samples are assigned to replicas in turn, the largest prompts first. Key-value heads and weights
    (except spread experts) are split over the ranks of a replica. Every rank of a replica stores
    all latents. If there are more ranks than heads, every rank stores one head.

    If `fits` is True, every rollout stays on its GPU until its end, for every order in which
    rollouts may grow. An engine that computes prompts in chunks frees the pages before a window
    only after each chunk. If an engine computes prompts in chunks, add one chunk's pages of
    windowed layers to `Gpu.reserve_bytes`. The plan does not pad the pages of all groups to one
    size.

    Args:
        groups: groups of layers with equal caches, from `kv_groups` or written by hand.
        rollouts: one entry for each shape of rollouts.
        tensor: number of ranks in one replica.
        gpus: number of GPUs. With `gpus=None`, the plan uses the fewest GPUs with room for all
            rollouts.
        page_tokens: number of tokens in a page: the engine's block size.
        host_bytes: host memory of all machines together, for rollouts that do not fit on the GPUs.
            Host memory stores the pages of every rank, as vLLM does, with copies of heads. If all
            groups are named "latents" or "index keys" and have one head, host memory stores a page
            once.
        disk_bytes: bytes of all disks together, for rollouts that do not fit in host memory.

    Raises:
        PlanError: `groups` or `rollouts` is empty, a number is too small, or `tensor` does not fit
            `gpus` or the number of heads.
        CapacityError: no number of GPUs is large enough, or the weights alone do not fit on `gpus`.
    """
    limits = {"host": host_bytes, "disk": disk_bytes}
    counts = {"tensor": tensor, "page_tokens": page_tokens}
    _check(groups, rollouts, counts, {f"{name}_bytes": x for name, x in limits.items()}, gpus)
    sizes = [
        (kind, footprint(groups, kind, page_tokens=page_tokens, tensor=tensor)) for kind in rollouts
    ]
    load = _Load(sorted(sizes, key=lambda size: -size[1].total_bytes), gpu, weights, tensor)
    data = load.fewest() if gpus is None else gpus // tensor
    room, peak = load.room(data), load.peak(data)
    if room < 0:
        raise CapacityError(
            f"weights need {-room} bytes more on each of {data * tensor} GPUs. "
            "Raise tensor, gpus or memory_fraction, or spread experts."
        )
    copies = 1 if all(each.name in _LATENTS and each.heads == 1 for each in groups) else tensor
    tiers, left = _place(load, data, copies=copies, limits=limits)
    priced = [(prompts, kind, False) for kind, prompts in left]
    priced += [(prompts * (kind.samples - 1), kind, True) for kind, prompts in left]
    return CapacityPlan(
        groups=tuple(groups),
        gpus=data * tensor,
        tensor=tensor,
        page_tokens=page_tokens,
        weight_bytes=weights.rank_bytes(tensor=tensor, data=data),
        kv_bytes=room,
        peak_bytes=peak.total_bytes,
        pages=peak.pages,
        tiers=tiers,
        left_over=_price(groups, priced, page_tokens, weights.active_parameters),
    )


@dataclass(frozen=True)
class _Load:
    """The load of the fullest replica, for any number of replicas."""

    kinds: list[tuple[Rollouts, Footprint]]
    gpu: Gpu
    weights: Weights
    tensor: int

    def room(self, data: int) -> int:  # Bytes for pages on each GPU.
        return self.gpu.usable_bytes - self.weights.rank_bytes(tensor=self.tensor, data=data)

    def peak(self, data: int) -> Footprint:
        """Return the most that the fullest replica holds."""
        dealt = list(zip(self.kinds, self.dealt(0, data), strict=True))
        columns = zip(
            *([count * each for each in size.pages] for (_, size), count in dealt), strict=True
        )
        return Footprint(
            tuple(map(sum, columns)), sum(size.total_bytes * count for (_, size), count in dealt)
        )

    def dealt(self, replica: int, data: int) -> list[int]:
        """Return the prompts of each kind on one replica. Replica 0 has the most."""
        counts, end = [], 0
        for kind, _ in self.kinds:
            begin, end = end, end + kind.prompts
            counts.append((end - replica - 1) // data - (begin - replica - 1) // data)
        return counts

    def replicas(self, data: int) -> list[tuple[int, int]]:
        """Return one replica of each load, and the number of replicas with that load."""
        ends = accumulate(kind.prompts for kind, _ in self.kinds)
        cuts = sorted({0, data, *(end % data for end in ends)})
        return [(cut, after - cut) for cut, after in pairwise(cuts)]

    def fewest(self) -> int:
        """Find the fewest replicas by bisection. With more replicas, each never holds more."""
        most = max(sum(kind.prompts for kind, _ in self.kinds), self.weights.experts, 1)
        most = min(most, sys.maxsize)  # What bisection can count.

        def lack(data: int) -> int:
            return self.peak(data).total_bytes - self.room(data)

        if lack(most) > 0:
            raise CapacityError(
                f"{most} replicas of tensor={self.tensor} are not enough: one prompt with its "
                f"samples and the weights need {lack(most)} bytes more on a GPU. Raise tensor, "
                "shorten rollouts, or use an fp8 cache. If prompts may be computed once per "
                "sample, write each sample as its own prompt."
            )
        return bisect_left(range(1, most), True, key=lambda data: lack(data) <= 0) + 1


def _place(
    load: _Load, data: int, *, copies: int, limits: dict[str, int]
) -> tuple[tuple[KvTier, ...], list[tuple[Rollouts, int]]]:
    """Place whole prompts at their largest in the first tier with room. Also return the rest.

    Host memory and disk store the pages of `copies` ranks.
    """
    budget = load.room(data)
    used = dict.fromkeys(("gpu", *limits), 0)
    held = dict.fromkeys(used, 0)
    waiting = [0] * len(load.kinds)
    for replica, alike in load.replicas(data):
        free = budget
        for index, prompts in enumerate(load.dealt(replica, data)):
            kind, size = load.kinds[index]
            fit = min(prompts, free // size.total_bytes)
            free -= fit * size.total_bytes
            held["gpu"] += fit * kind.samples * alike
            waiting[index] += (prompts - fit) * alike
        used["gpu"] += (budget - free) * load.tensor * alike
    for index, (kind, size) in enumerate(load.kinds):
        each = size.total_bytes * copies
        for name, limit in limits.items():
            fit = min(waiting[index], (limit - used[name]) // each)
            used[name] += fit * each
            held[name] += fit * kind.samples
            waiting[index] -= fit
    limits = {"gpu": budget * load.tensor * data, **limits}
    tiers = tuple(KvTier(name, held[name], used[name], limits[name]) for name in used)
    return tiers, [(kind, n) for (kind, _), n in zip(load.kinds, waiting, strict=True) if n]


def _price(
    groups: Sequence[KvGroup],
    evicted: Iterable[tuple[int, Rollouts, bool]],
    page_tokens: int,
    active_parameters: int,
) -> Recompute:
    """Return the cost of recomputing some rollouts of each kind, with or without their prompt."""
    # A state after the shared part is not kept, so a model with states begins at token 0.
    reused = not any(group.state_head_bytes for group in groups)
    rollouts = tokens = flops = 0
    for count, kind, sibling in evicted:
        start = kind.shared_pages(page_tokens) * page_tokens if sibling and reused else 0
        rollouts += count
        tokens += count * (kind.tokens - start)
        flops += count * prefill_flops(
            groups, start=start, end=kind.tokens, active_parameters=active_parameters
        )
    return Recompute(rollouts, tokens, flops)


def _check(
    groups: Sequence[KvGroup],
    rollouts: Sequence[Rollouts],
    numbers: dict[str, int],
    sizes: dict[str, int],
    gpus: int | None,
) -> None:
    if not groups or not rollouts:
        raise PlanError(
            f"plan_capacity needs groups and rollouts; got {len(groups)} and {len(rollouts)}."
        )
    check_counts(**numbers, **({} if gpus is None else {"gpus": gpus}))
    check_counts(least=0, **sizes)
    tensor = numbers["tensor"]
    if gpus is not None and gpus % tensor:
        raise PlanError(
            f"gpus={gpus} cannot be divided into whole replicas of tensor={tensor}. Use "
            f"{gpus // tensor * tensor or tensor} or {-(-gpus // tensor) * tensor}."
        )
