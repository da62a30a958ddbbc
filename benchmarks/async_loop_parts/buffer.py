"""A buffer in one process, and groups that come to it from another process over ZeroMQ.

The other process sends groups whose rollouts take 4 kB, 1 MB and 20 MB (`rollouts.SHAPES`); each is
taken once and settled. The peer is pyzmq alone: the same payloads through PUSH and PULL, unread.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time

import zmq

from primeblocks.async_loop import Group, RolloutBuffer, StalenessPolicy
from primeblocks.async_loop.adapters.zmq import RolloutReceiver, RolloutSender
from primeblocks.async_loop.ledger import pack_whole_group

from ..harness import Timing, compare
from .rollouts import SHAPES, Shape, make_groups

__all__ = ["figures"]

Figures = dict[str, tuple[float, str, str]]

POLICY = StalenessPolicy(2, "pace", "none: a benchmark")
TIMEOUT_S = 600.0


def figures() -> Figures:
    found = in_process()
    for name, shape in SHAPES.items():
        found |= _over_zmq(f"async_loop.buffer.zmq.{name}", shape)
    return found


def in_process(*, runs: int = 7) -> Figures:
    """The buffer of one process, which hands objects on."""
    made = make_groups(SHAPES["1MB"], range(SHAPES["1MB"].groups))
    taken: list[Group] = []

    async def through() -> None:  # asyncio.run writes a result as text, which takes longer.
        buffer = RolloutBuffer(capacity=len(made), staleness=POLICY)
        for group in made:
            await buffer.put(group, timeout_s=60)
        taken[:] = await buffer.take(len(made), version=3, timeout_s=60)

    def agree() -> None:
        asyncio.run(through())
        assert {*map(id, taken)} == {*map(id, made)}

    (timing,) = compare(lambda: asyncio.run(through()), agree=agree, runs=runs)
    microseconds = timing.median / len(made) * 1e6
    return {"async_loop.buffer.in_process.us_per_group": (microseconds, "us", "")}


def _over_zmq(at: str, shape: Shape, *, runs: int = 5) -> Figures:
    sent = {each.ordinal: each.nbytes for each in make_groups(shape, range(shape.groups))}
    taken, ours, plain = asyncio.run(_runs(shape, runs))
    assert [sorted((g.ordinal, g.nbytes) for g in groups) for groups in taken] == [
        sorted(sent.items())
    ] * runs
    nbytes = sum(sent.values())
    return {
        f"{at}.mb_per_s": (nbytes / ours.median / 1e6, "MB/s", ""),
        f"{at}.spread": (ours.spread, "ratio", ""),
        f"{at}.over_plain_zmq": (plain.median / ours.median, "ratio", "pyzmq PUSH and PULL"),
    }


async def _runs(shape: Shape, runs: int) -> tuple[list[tuple[Group, ...]], Timing, Timing]:
    """Both ways in turn: what came, and seconds. Senders have made their groups beforehand."""
    taken, ours, plain = [], [], []
    buffer = RolloutBuffer(capacity=shape.groups, staleness=POLICY)
    spawn = multiprocessing.get_context("spawn")
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        async with RolloutReceiver(buffer, "tcp://127.0.0.1:0") as receiver:
            here, there = spawn.Pipe()
            addresses = receiver.address, f"tcp://127.0.0.1:{port}"
            sender = spawn.Process(target=_send, args=(there, *addresses, shape))
            sender.start()
            here.recv()
            for _ in range(runs + 1):  # The first one is not counted.
                start = time.perf_counter()
                here.send("ours")
                groups = await buffer.take(shape.groups, version=3, timeout_s=TIMEOUT_S)
                ours.append(time.perf_counter() - start)
                receiver.settle(*groups)
                await asyncio.to_thread(here.recv)
                taken.append(groups)
                start = time.perf_counter()
                here.send("plain")
                for _ in range(shape.groups):
                    pull.recv(copy=False)
                plain.append(time.perf_counter() - start)
            here.send("")
            sender.join(TIMEOUT_S)
    return taken[1:], Timing(tuple(ours[1:])), Timing(tuple(plain[1:]))


def _send(pipe, address: str, plain_address: str, shape: Shape) -> None:
    groups = make_groups(shape, range(shape.groups))
    payloads = [pack_whole_group(each) for each in groups]

    async def send() -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as push:
            push.connect(plain_address)
            async with RolloutSender(address) as sender:
                pipe.send("ready")
                while way := await asyncio.to_thread(pipe.recv):
                    if way == "plain":
                        for each in payloads:
                            push.send(each, copy=False)
                        continue
                    puts = [sender.put(each, timeout_s=TIMEOUT_S) for each in groups]
                    await asyncio.gather(*puts)
                    await sender.settled(timeout_s=TIMEOUT_S)
                    pipe.send("settled")

    asyncio.run(send())
