"""From rollouts to the fewest GPUs that hold them, and the load of each tier.

The most pages that rollouts can hold, and the cost of computing them again, are closed forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import CapacityError, PlanError
from .kv_shapes import KvGroup
from .plan import CapacityPlan, Gpu, KvTier, Recompute, Weights

__all__ = ["Footprint", "Rollouts", "footprint", "plan_capacity", "prefill_flops"]


@dataclass(frozen=True)
class Rollouts:
    """Rollouts of one shape, all in flight at once.

    Attributes:
        prompts: number of different prompts.
        prompt_tokens: length of each.
        completion_tokens: the most that follow the prompt in one rollout, all turns together.
        samples: rollouts of one prompt; they share its whole pages.

    Raises:
        PlanError: a number is below 1.
    """

    prompts: int
    prompt_tokens: int
    completion_tokens: int
    samples: int = 1

    def __post_init__(self) -> None:
        numbers = (self.prompts, self.prompt_tokens, self.completion_tokens, self.samples)
        if min(numbers) < 1:
            raise PlanError(f"counts and lengths must be at least 1; got {self}")

    @property
    def tokens(self) -> int:
        """Tokens with keys and values: all but the last, which no later token attends to."""
        return self.prompt_tokens + self.completion_tokens - 1

    def shared_pages(self, page_tokens: int) -> int:
        """Count whole pages before the prompt's last token, which every sample computes itself."""
        return (self.prompt_tokens - 1) // page_tokens


@dataclass(frozen=True)
class Footprint:
    """The most that the samples of one prompt can hold on one rank.

    Attributes:
        pages: by group, when the samples hold the most bytes.
        total_bytes: those pages and all states.
    """

    pages: tuple[int, ...]
    total_bytes: int


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

    `gpus` are replicas of attention of `tensor` ranks each. Whole prompts are dealt to replicas in
    turn, the largest first. Weights and key-value heads split over a replica; heads that are fewer
    than its ranks, and latents, are on every rank. The promise is for every order in which
    rollouts may grow: with the planned GPUs nothing is evicted before it ends. An engine that
    computes prompts in chunks frees a window's pages after each chunk, not after each token; give
    it the chunk's pages of windowed layers in `Gpu.reserve_bytes`. Page sizes of groups are added
    as they are, not padded to one size.

    Args:
        groups: layers with equal caches, from `kv_groups` or written by hand.
        rollouts: one entry for each shape.
        tensor: ranks of one replica.
        gpus: number of GPUs; None finds the fewest that hold everything.
        page_tokens: tokens of a page, the engine's block size.
        host_bytes: memory of all hosts together, for rollouts that the GPUs do not hold. A page is
            there once, whatever the number of ranks that hold it.
        disk_bytes: room on all disks together, behind the hosts.

    Raises:
        PlanError: numbers that do not fit together.
        CapacityError: no number of GPUs is enough, or not even the weights fit on `gpus`.
    """
    numbers = {"tensor": tensor, "page_tokens": page_tokens}
    numbers |= {} if gpus is None else {"gpus": gpus}
    limits = {"host": host_bytes, "disk": disk_bytes}
    _check(groups, rollouts, numbers, limits)
    kinds = _largest_first(groups, rollouts, page_tokens=page_tokens, tensor=tensor)
    load = _Load(kinds, gpu, weights, tensor)
    data = load.fewest() if gpus is None else gpus // tensor
    if load.room(data) < 0:
        raise CapacityError(
            f"weights need {-load.room(data)} bytes more on each of {data * tensor} GPUs. "
            "Raise tensor, gpus or memory_fraction, or spread experts."
        )
    tiers, left = _place(groups, load, data, page_tokens=page_tokens, limits=limits)
    one, left_over = _prices(groups, rollouts, left, page_tokens, weights.active_parameters)
    return CapacityPlan(
        groups=tuple(groups),
        gpus=data * tensor,
        tensor=tensor,
        page_tokens=page_tokens,
        weight_bytes=weights.rank_bytes(tensor=tensor, data=data),
        kv_bytes=load.room(data),
        peak_bytes=load.peak(data),
        pages=load.pages(data),
        tiers=tiers,
        one_eviction=one,
        left_over=left_over,
    )


@dataclass(frozen=True)
class _Load:
    """The load of the fullest replica, for any number of replicas."""

    kinds: list[tuple[Rollouts, Footprint]]
    gpu: Gpu
    weights: Weights
    tensor: int

    def room(self, data: int) -> int:
        """Return the bytes for pages on each GPU."""
        return self.gpu.usable_bytes - self.weights.rank_bytes(tensor=self.tensor, data=data)

    def peak(self, data: int) -> int:
        dealt = zip(self.kinds, self.dealt(0, data), strict=True)
        return sum(size.total_bytes * count for (_, size), count in dealt)

    def pages(self, data: int) -> tuple[int, ...]:
        """Return the pages of each group when the fullest replica holds the most."""
        dealt = self.dealt(0, data)
        columns = zip(*(size.pages for _, size in self.kinds), strict=True)
        return tuple(sum(map(int.__mul__, column, dealt)) for column in columns)

    def dealt(self, replica: int, data: int) -> list[int]:
        """Return the prompts of each kind on one replica; replica 0 has the most."""
        counts, end = [], 0
        for kind, _ in self.kinds:
            begin, end = end, end + kind.prompts
            counts.append((end - replica - 1) // data - (begin - replica - 1) // data)
        return counts

    def fewest(self) -> int:
        """Find the fewest replicas by bisection: with more of them, each never holds more."""
        most = max(sum(kind.prompts for kind, _ in self.kinds), self.weights.experts, 1)
        if self.peak(most) > self.room(most):
            raise CapacityError(
                f"{most} replicas of tensor={self.tensor} are not enough: one prompt with its "
                f"samples and the weights need {self.peak(most) - self.room(most)} bytes more on "
                "a GPU. Raise tensor, shorten rollouts, use an fp8 cache, or give up sharing: "
                "write samples as prompts of their own."
            )
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self.peak(middle) <= self.room(middle):
                high = middle
            else:
                low = middle + 1
        return low


def _largest_first(
    groups: Sequence[KvGroup], rollouts: Sequence[Rollouts], *, page_tokens: int, tensor: int
) -> list[tuple[Rollouts, Footprint]]:
    kinds = [
        (each, footprint(groups, each, page_tokens=page_tokens, tensor=tensor)) for each in rollouts
    ]
    return sorted(kinds, key=lambda kind: -kind[1].total_bytes)


def _place(
    groups: Sequence[KvGroup],
    load: _Load,
    data: int,
    *,
    page_tokens: int,
    limits: dict[str, int],
) -> tuple[tuple[KvTier, ...], list[tuple[Rollouts, int]]]:
    """Place whole prompts at their largest in the first tier with room; return those left too."""
    budget = load.room(data)
    used = dict.fromkeys(("gpu", *limits), 0)
    held = dict.fromkeys(used, 0)
    waiting = [0] * len(load.kinds)
    for replica in range(data):
        free = budget
        for index, prompts in enumerate(load.dealt(replica, data)):
            kind, size = load.kinds[index]
            fit = min(prompts, free // size.total_bytes)
            free -= fit * size.total_bytes
            held["gpu"] += fit * kind.samples
            waiting[index] += prompts - fit
        used["gpu"] += (budget - free) * load.tensor
    for index, (kind, _) in enumerate(load.kinds):
        each = footprint(groups, kind, page_tokens=page_tokens).total_bytes
        for name, limit in limits.items():
            fit = min(waiting[index], (limit - used[name]) // each)
            used[name] += fit * each
            held[name] += fit * kind.samples
            waiting[index] -= fit
    limits = {"gpu": budget * load.tensor * data, **limits}
    tiers = tuple(KvTier(name, held[name], used[name], limits[name]) for name in used)
    return tiers, [(kind, n) for (kind, _), n in zip(load.kinds, waiting, strict=True) if n]


def _prices(
    groups: Sequence[KvGroup],
    rollouts: Sequence[Rollouts],
    left: list[tuple[Rollouts, int]],
    page_tokens: int,
    active_parameters: int,
) -> tuple[Recompute, Recompute]:
    """Price the longest rollout, and the prompts with all samples that no tier has room for."""
    # A state after the shared part is not kept: a model with states begins at token 0.
    reused = not any(group.state_head_bytes for group in groups)

    def again(kind: Rollouts, *, sibling: bool) -> Recompute:
        start = kind.shared_pages(page_tokens) * page_tokens if sibling and reused else 0
        flops = prefill_flops(
            groups, start=start, end=kind.tokens, active_parameters=active_parameters
        )
        return Recompute(1, kind.tokens - start, flops)

    left_over = Recompute(0, 0, 0)
    for kind, prompts in left:
        left_over += again(kind, sibling=False) * prompts
        left_over += again(kind, sibling=True) * (prompts * (kind.samples - 1))
    longest = max(rollouts, key=lambda kind: kind.tokens)
    return again(longest, sibling=longest.samples > 1), left_over


def _check(
    groups: Sequence[KvGroup],
    rollouts: Sequence[Rollouts],
    numbers: dict[str, int],
    sizes: dict[str, int],
) -> None:
    if not groups or not rollouts:
        raise PlanError(f"needs groups and rollouts; got {len(groups)} and {len(rollouts)}")
    for name, number in numbers.items():
        if number < 1:
            raise PlanError(f"{name} must be at least 1; got {number}")
    for name, size in sizes.items():
        if size < 0:
            raise PlanError(f"{name} counts bytes; got {size}")
    tensor, gpus = numbers["tensor"], numbers.get("gpus", numbers["tensor"])
    if gpus % tensor:
        raise PlanError(
            f"gpus={gpus} are not whole replicas of tensor={tensor}. "
            f"Use {gpus // tensor * tensor or tensor} or {-(-gpus // tensor) * tensor}."
        )


def footprint(
    groups: Sequence[KvGroup], rollouts: Rollouts, *, page_tokens: int, tensor: int = 1
) -> Footprint:
    """Return the peak over every order in which samples can grow, token by token. Pure.

    Samples after the first begin when the prompt is in its pages; each is then at any length up to
    its end. Only lengths in the last page are tried: one page earlier, a rollout never holds more,
    since a window moves by whole pages and everything else only grows.
    """
    end = rollouts.tokens
    begin = 1 if rollouts.samples == 1 else rollouts.prompt_tokens
    lengths = range(max(begin, end - page_tokens + 1), end + 1)
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
    """Count a rollout's forward FLOPs of tokens `start` to `end` (exclusive), a closed form. Pure.

    Two for each active parameter and token, and attention to the keys that each token sees.
    Recurrent states are not counted; a model with them computes from token 0.
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
