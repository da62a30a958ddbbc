"""What the loop itself costs: an engine that answers at once, a trainer that does nothing."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
import tracemalloc
from typing import Any

import numpy as np

from primeblocks.async_loop import AsyncLoop, Group, Rollout, RolloutBuffer, StalenessPolicy

__all__ = ["figures"]

GROUP, BATCH, IN_FLIGHT, BOUND = 8, 32, 512, 4


def _rollout(prompt: int, sample: int, version: int) -> Rollout:
    return Rollout(
        tokens=np.array([1 + prompt % 1000, 2, 3, 4 + sample]),
        prompt_length=2,
        logprobs=np.array([-1.0, -2.0]),
        versions=np.array([version, version]),
        finish_reason="stop",
    )


async def _run(rollouts: int, *, singly: bool) -> tuple[float, int]:
    """Seconds for that many rollouts, and how many were trained on."""
    trained = 0

    async def one(prompt: int, *, version: int, sample: int) -> Rollout:
        await asyncio.sleep(0)
        return _rollout(prompt, sample, version)

    async def group(prompt: int, *, version: int) -> list[Rollout]:
        await asyncio.sleep(0)
        return [_rollout(prompt, sample, version) for sample in range(GROUP)]

    async def train(groups: tuple[Group, ...], *, version: int) -> None:
        nonlocal trained
        trained += sum(len(each.rollouts) for each in groups)

    async def publish(version: int) -> None:
        pass

    loop = AsyncLoop(
        prompts=itertools.count(),
        generate=one if singly else group,
        group_size=GROUP if singly else None,
        train=train,
        publish=publish,
        buffer=RolloutBuffer(
            capacity=(BOUND + 1) * BATCH,
            staleness=StalenessPolicy(BOUND, "pace", "none: a benchmark"),
        ),
        batch_size=BATCH,
        max_in_flight=IN_FLIGHT if singly else IN_FLIGHT // GROUP,
    )
    begun = time.perf_counter()
    async with loop:
        async for _ in loop.steps(rollouts // (GROUP * BATCH)):
            pass
    return time.perf_counter() - begun, trained


def _bare(rollouts: int) -> float:
    """Seconds to make the rollouts and nothing else."""
    begun = time.perf_counter()
    for i in range(rollouts):
        _rollout(i // GROUP, i % GROUP, 0)
    return time.perf_counter() - begun


def _growth(rollouts: int) -> int:
    """Bytes more after the second half of a run than after the first."""

    async def measured() -> Any:
        await _run(rollouts // 4, singly=True)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        await _run(rollouts, singly=True)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        return asyncio.run(measured())
    finally:
        tracemalloc.stop()


def figures() -> dict[str, tuple[float, str, str]]:
    count = 100 * 1024
    asyncio.run(_run(10 * 1024, singly=True))  # warm
    made = _bare(count) / count
    found: dict[str, tuple[float, str, str]] = {}
    for name, singly in (("", True), (".whole_groups", False)):
        seconds, trained = asyncio.run(_run(count, singly=singly))
        assert trained == count // (GROUP * BATCH) * GROUP * BATCH, f"{trained} of {count}"
        found[f"async_loop.overhead_us_per_rollout{name}"] = (
            (seconds / count - made) * 1e6, "us", "",
        )  # fmt: skip
    found["async_loop.rollout_us"] = (made * 1e6, "us", "")
    found["async_loop.memory_growth_bytes_100k_rollouts"] = (float(_growth(count)), "B", "")
    return found
