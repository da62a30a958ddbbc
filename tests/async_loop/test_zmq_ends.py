"""Groups over ZeroMQ that nobody trains on: withdrawn, dropped, refused."""

import asyncio
import json
import time

import pytest

from primeblocks.async_loop import RolloutBuffer, StalenessPolicy, packed
from primeblocks.errors import DeadlineError, UnsupportedError
from tests.deadlines import HANG_S

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
from primeblocks.async_loop.adapters.zmq import RolloutReceiver, RolloutSender  # noqa: E402
from tests.async_loop.test_zmq import ANY, POLICY, buffer_of, make_group, run  # noqa: E402


def test_a_group_that_is_withdrawn_while_the_trainer_steps_takes_no_room():
    """The group and the word that it is no longer kept are read one right after the other."""

    async def body():
        receiver = RolloutReceiver(buffer_of(), ANY)
        async with receiver:
            with zmq.Context() as context, context.socket(zmq.DEALER) as worker:
                worker.setsockopt(zmq.LINGER, 0)
                worker.connect(receiver.address)
                head = {"sender": "one", "number": 1, "ordinal": 3}
                payload = packed.pack_whole_group(make_group(3))
                worker.send_multipart([b"group", json.dumps(head).encode(), payload])
                look = {"sender": "one", "number": 2, "kept": []}
                worker.send_multipart([b"look", json.dumps(look).encode()])
                time.sleep(0.5)  # A step, in the event loop.
                while receiver._numbers.get(next(iter(receiver._numbers), b""), 0) < 2:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0)
                assert receiver._known == {}
                assert receiver._waiting_bytes == 0

    run(body())


def test_a_group_dropped_while_it_waits_for_room_is_settled():
    async def body():
        buffer = RolloutBuffer(capacity=1, staleness=StalenessPolicy(0, "drop"))
        receiver = RolloutReceiver(buffer, ANY)
        async with receiver, RolloutSender(receiver.address, retry_s=0.02) as sender:
            await sender.put(make_group(0), timeout_s=HANG_S)
            waiting = asyncio.ensure_future(sender.put(make_group(1), timeout_s=HANG_S))
            while 1 not in receiver._known:
                await asyncio.sleep(0.01)
            with pytest.raises(DeadlineError):
                await buffer.take(1, version=3, timeout_s=0.1, on_drop=receiver.settle)
            await waiting
            await sender.settled(timeout_s=HANG_S)

    run(body())


def test_a_group_that_a_later_receiver_refuses_is_told():
    async def body():
        first = RolloutReceiver(buffer_of(), ANY)
        async with RolloutSender(first.address, retry_s=0.02) as sender:
            async with first:
                await sender.put(make_group(0, size=1000), timeout_s=HANG_S)
            small = RolloutBuffer(capacity=8, staleness=POLICY, capacity_bytes=100)
            async with RolloutReceiver(small, first.address):
                with pytest.raises(UnsupportedError, match="refused the group of ordinal 0"):
                    await sender.settled(timeout_s=HANG_S)

    run(body())
