"""Groups over ZeroMQ that nobody trains on: withdrawn, dropped, refused."""

import asyncio
import json
import time

import pytest

from primeblocks.async_loop import RolloutBuffer, StalenessPolicy
from primeblocks.async_loop import ledger as packed
from primeblocks.errors import DeadlineError, UnsupportedError, UsageError
from primeblocks.testing.faults import ManualClock
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
                while ("one", 2) not in receiver._heard.values():
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0)
                assert receiver._known == {}
                assert receiver._waiting_bytes == 0

    run(body())


def test_a_group_dropped_while_it_waits_for_room_is_settled():
    async def body():
        clock = ManualClock()
        buffer = RolloutBuffer(capacity=1, staleness=StalenessPolicy(0, "drop"), clock=clock)
        receiver = RolloutReceiver(buffer, ANY)
        async with receiver, RolloutSender(receiver.address, retry_s=0.02) as sender:
            await sender.put(make_group(0), timeout_s=HANG_S)
            waiting = asyncio.ensure_future(sender.put(make_group(1), timeout_s=HANG_S))
            while 1 not in receiver._known:
                await asyncio.sleep(0.01)
            take = buffer.take(1, version=3, timeout_s=HANG_S, on_drop=receiver.settle)
            taking = asyncio.ensure_future(take)
            await waiting
            clock.advance(HANG_S)
            with pytest.raises(DeadlineError):
                await taking
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


def test_a_trainer_that_went_back_meets_groups_of_later_policies_once():
    """They are handed to `on_drop`, which settles them: a later receiver gets none of them."""

    async def body():
        first = RolloutReceiver(buffer_of(), ANY)
        async with RolloutSender(first.address, retry_s=0.02) as sender:
            async with first:
                await sender.put(make_group(0), timeout_s=HANG_S)  # Of policy 2.
            buffer = buffer_of()
            async with RolloutReceiver(buffer, first.address) as receiver:
                with pytest.raises(UsageError, match="the later policy 2"):
                    await buffer.take(1, version=1, timeout_s=HANG_S, on_drop=receiver.settle)
                await sender.settled(timeout_s=HANG_S)
                await sender.put(make_group(1), timeout_s=HANG_S)
                (came,) = await buffer.take(1, version=2, timeout_s=HANG_S)
                assert came.ordinal == 1

    run(body())


def test_lists_of_many_groups_are_read_on_both_sides():
    """More than a megabyte of them, and of more than `max_group_bytes`."""

    async def body():
        many = {str(ordinal): "accepted" for ordinal in range(1, 100_000)}
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as trainer:
            trainer.setsockopt(zmq.LINGER, 0)
            port = trainer.bind_to_random_port("tcp://127.0.0.1")
            async with RolloutSender(f"tcp://127.0.0.1:{port}", retry_s=0.02) as sender:
                waiting = asyncio.ensure_future(sender.put(make_group(0), timeout_s=HANG_S))
                while not waiting.done():
                    route, kind, *_ = await trainer.recv_multipart()
                    states = many | ({"0": "accepted"} if kind == b"group" else {})
                    answer = {"number": 0, "states": states, "refused": {}}
                    answer["max_group_bytes"] = 1 << 20
                    await trainer.send_multipart([route, json.dumps(answer).encode()])
                    await asyncio.sleep(0)
                await waiting
        receiver = RolloutReceiver(buffer_of(), ANY, max_group_bytes=1000)
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as worker:
            async with receiver:
                worker.setsockopt(zmq.LINGER, 0)
                worker.connect(receiver.address)
                look = {"sender": "one", "number": 1, "kept": [*range(300_000)]}
                await worker.send_multipart([b"look", json.dumps(look).encode()])
                (answer,) = await worker.recv_multipart()
                assert json.loads(answer)["number"] == 1
                head = {"sender": "one", "number": 2, "ordinal": 3}
                payload = packed.pack_whole_group(make_group(3, size=100))
                await worker.send_multipart([b"group", json.dumps(head).encode(), payload])
                (answer,) = await worker.recv_multipart()
                assert "above max_group_bytes=1,000" in json.loads(answer)["refused"]["3"]

    run(body())


@pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")
def test_only_senders_with_a_key_deliver_to_a_receiver_with_curve():
    (public, secret), (own_public, own_secret) = zmq.curve_keypair(), zmq.curve_keypair()

    def serves(socket):
        socket.curve_server, socket.curve_secretkey = True, secret

    def connects(socket):
        socket.curve_serverkey = public
        socket.curve_publickey, socket.curve_secretkey = own_public, own_secret

    async def body():
        buffer = buffer_of()
        async with RolloutReceiver(buffer, ANY, configure=serves) as receiver:
            async with RolloutSender(receiver.address) as plain:
                with pytest.raises(DeadlineError, match="put of group 0"):
                    await plain.put(make_group(0), timeout_s=0.3)
            async with RolloutSender(receiver.address, configure=connects) as sender:
                await sender.put(make_group(1), timeout_s=HANG_S)
                (group,) = await buffer.take(1, version=2, timeout_s=HANG_S)
                assert group.ordinal == 1
                receiver.settle(group)

    run(body())
