"""Groups over ZeroMQ: acknowledged, bounded, and lost by no single death."""

import asyncio
import json
import multiprocessing
import os
import pickle
import signal
import sys

import numpy as np
import pytest
import xxhash

from primeblocks import codec
from primeblocks.async_loop import Group, Rollout, RolloutBuffer, StalenessPolicy
from primeblocks.attachments import Aligned
from primeblocks.errors import (
    CapacityError,
    ClosedError,
    DeadlineError,
    UnsupportedError,
    UsageError,
)
from primeblocks.testing.faults import ManualClock
from tests.deadlines import HANG_S

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
from primeblocks.async_loop.adapters.zmq import RolloutReceiver, RolloutSender  # noqa: E402

POLICY = StalenessPolicy(4, "pace", "none: a test")
ANY = "tcp://127.0.0.1:0"
PROCESSES = multiprocessing.get_context("forkserver")


def make_group(ordinal, *, size=3, prompt=None):
    rollout = Rollout(
        tokens=np.arange(size + 1),
        prompt_length=1,
        logprobs=-np.arange(size) / 7,
        versions=np.full(size, 2),
        finish_reason="length",
        reward=0.5,
        rewards={"length": 0.25},
        attachments={"routes": Aligned.rows(np.ones((size, 2), np.uint8), start=0), "note": "ä"},
    )
    return Group({"row": ordinal} if prompt is None else prompt, (rollout,) * 2, 2, 1.5, ordinal)


def buffer_of(capacity=8):
    return RolloutBuffer(capacity=capacity, staleness=POLICY)


def run(body):
    return asyncio.run(asyncio.wait_for(body, HANG_S))


def test_a_group_arrives_as_it_was_and_its_copy_goes_once_it_is_settled():
    async def body():
        buffer = buffer_of()
        receiver = RolloutReceiver(buffer, ANY)
        async with receiver, RolloutSender(receiver.address) as sender:
            sent = make_group(7)
            await sender.put(sent, timeout_s=HANG_S)
            (came,) = await buffer.take(1, version=2, timeout_s=HANG_S)
            assert sender.kept == (7,)
            with pytest.raises(UsageError, match="ordinal 7 is not settled"):
                await sender.put(sent, timeout_s=HANG_S)
            with pytest.raises(DeadlineError, match="settling"):
                await sender.settled(timeout_s=0.01)
            receiver.settle(came, make_group(99))
            await sender.settled(timeout_s=HANG_S)
            assert sender.kept == ()
        return sent, came

    sent, came = run(body())
    assert (came.prompt, came.version, came.generate_s) == (sent.prompt, 2, 1.5)
    for a, b in zip(sent.rollouts, came.rollouts, strict=True):
        for name in ("tokens", "logprobs", "versions", "loss_mask"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert (a.reward, dict(a.rewards), a.finish_reason) == (
            b.reward,
            dict(b.rewards),
            b.finish_reason,
        )
        assert b.attachments["note"] == "ä"
        np.testing.assert_array_equal(a.attachments["routes"].value, b.attachments["routes"].value)


def test_a_full_buffer_holds_put_back_and_a_withdrawn_group_is_not_delivered():
    async def body():
        buffer, clock = buffer_of(capacity=1), ManualClock()
        receiver = RolloutReceiver(buffer, ANY)
        sender = RolloutSender(receiver.address, retry_s=0.02, clock=clock)
        async with receiver, sender:
            await sender.put(make_group(0), timeout_s=HANG_S)
            withdrawn = asyncio.ensure_future(sender.put(make_group(1), timeout_s=HANG_S))
            while 1 not in receiver._known:  # Until it has arrived.
                await asyncio.sleep(0.01)
            clock.advance(HANG_S)
            with pytest.raises(DeadlineError, match="put of group 1 at tcp"):
                await withdrawn
            assert sender.kept == (0,)
            while 1 in receiver._known:  # Until a message names what is kept.
                await asyncio.sleep(0.01)
            waiting = asyncio.ensure_future(sender.put(make_group(2), timeout_s=HANG_S))
            taken = await buffer.take(1, version=2, timeout_s=HANG_S)
            await waiting
            taken += await buffer.take(1, version=2, timeout_s=HANG_S)
            assert [each.ordinal for each in taken] == [0, 2]

    run(body())


def test_bytes_are_bounded_on_both_sides():
    size = len(codec.pack(np.zeros(1000), name="x"))

    async def body():
        buffer = buffer_of(capacity=1)
        async with RolloutReceiver(
            buffer, ANY, capacity_bytes=size, max_group_bytes=100 * size
        ) as receiver:
            many = 40
            async with RolloutSender(receiver.address, retry_s=0.02) as sender:
                puts = [
                    asyncio.ensure_future(sender.put(make_group(i, size=1000), timeout_s=HANG_S))
                    for i in range(many)
                ]
                taken = []
                while len(taken) < many:
                    assert receiver._waiting_bytes <= size + 200_000  # A group more at most.
                    taken += await buffer.take(1, version=2, timeout_s=HANG_S)
                await asyncio.gather(*puts)
                assert sorted(each.ordinal for each in taken) == [*range(many)]
                receiver.settle(*taken)
                await sender.settled(timeout_s=HANG_S)
                with pytest.raises(CapacityError, match="above the receiver's max_group_bytes"):
                    await sender.put(make_group(50, size=20_000 * 100), timeout_s=HANG_S)
            async with RolloutSender(receiver.address, capacity_bytes=3000) as small:
                with pytest.raises(CapacityError, match="above capacity_bytes=3,000"):
                    await small.put(make_group(51, size=1000), timeout_s=HANG_S)
                await small.put(make_group(52), timeout_s=HANG_S)
                with pytest.raises(DeadlineError):  # Its own bytes are all in use.
                    await small.put(make_group(53), timeout_s=0.2)
                receiver.settle(*await buffer.take(1, version=2, timeout_s=HANG_S))
                await small.put(make_group(53), timeout_s=HANG_S)

    run(body())


def test_a_receiver_that_starts_again_gets_what_was_not_settled():
    async def body():
        first = RolloutReceiver(buffer_of(), ANY)
        address = first.address
        async with RolloutSender(address, retry_s=0.05) as sender:
            for i in range(4):
                await sender.put(make_group(i), timeout_s=HANG_S)
            first.settle(*(await first._buffer.take(2, version=2, timeout_s=HANG_S)))
            while len(sender.kept) > 2:
                await asyncio.sleep(0.01)
            first.close()
            with pytest.raises(ClosedError, match="closed"):
                first.settle(make_group(2))
            buffer = buffer_of()
            async with RolloutReceiver(buffer, address) as second:
                again = await buffer.take(2, version=2, timeout_s=HANG_S)
                assert {each.ordinal for each in again} == {2, 3}
                await sender.put(make_group(4), timeout_s=HANG_S)
                again += await buffer.take(1, version=2, timeout_s=HANG_S)
                second.settle(*again)
                await sender.settled(timeout_s=HANG_S)
                assert len(buffer) == 0

    run(body())


def test_what_cannot_be_sent_is_said_at_once():
    async def body():
        with pytest.raises(UsageError, match="cannot be opened"):
            RolloutReceiver(buffer_of(), "nowhere")
        with pytest.raises(UsageError, match="cannot be opened"):
            RolloutSender("nowhere")
        with pytest.raises(UsageError, match="retry_s"):
            RolloutSender(ANY, retry_s=0)
        async with RolloutReceiver(buffer_of(), ANY) as receiver:
            with pytest.raises(UsageError, match="cannot be opened"):
                RolloutReceiver(buffer_of(), receiver.address)
            async with RolloutSender(receiver.address) as sender:
                with pytest.raises(UnsupportedError, match="prompt"):
                    await sender.put(make_group(0, prompt=object()), timeout_s=HANG_S)
                with pytest.raises(UsageError, match="ordinal"):
                    await sender.put(make_group(-1, prompt=0), timeout_s=HANG_S)
                small = RolloutBuffer(capacity=1, capacity_bytes=10, staleness=POLICY)
                receiver._buffer = small
                with pytest.raises(UnsupportedError, match="refused.*Raise capacity_bytes"):
                    await sender.put(make_group(1), timeout_s=HANG_S)
        with pytest.raises(ClosedError, match="closed"):
            await sender.put(make_group(2), timeout_s=HANG_S)
        async with RolloutSender("tcp://127.0.0.1:1") as alone:
            with pytest.raises(DeadlineError, match="put of group 3 at tcp://127.0.0.1:1"):
                await alone.put(make_group(3), timeout_s=0.1)

    run(body())


class _Bomb:
    def __reduce__(self):
        return os._exit, (3,)


def _hostile(generator):
    """Messages of a stranger: pickles, nonsense, sealed lies, damaged groups."""
    payload = codec.pack({"a": np.arange(9)}, name="the group of ordinal 5")
    head = json.dumps({"sender": "x", "number": 1, "ordinal": 5}).encode()
    yield [pickle.dumps(_Bomb())]
    yield [b"group", pickle.dumps(_Bomb()), pickle.dumps(_Bomb())]
    yield [b"group", head, pickle.dumps(_Bomb())]
    for lie in (
        {"array": ["O", [4]]},
        {"array": ["V0", [4]]},
        {"array": ["<f8", [1 << 60]]},
        {"array": ["<f8", [-1, -1]]},
        {"array": [[["a", "O"]], [1]]},
        {"tuple": [[]] * 3},
        {"aligned": [1]},
        {"dict": {"rollouts": {"list": [{"dict": {"tokens": 1}}]}}},
        {"dict": {"rollouts": {"list": []}, "__class__": 1}},
        {},
        [],
    ):
        text = json.dumps(lie).encode()
        body = len(text).to_bytes(8, "little") + text + bytes(64)
        seal = xxhash.xxh3_64(b"the group of ordinal 5")
        seal.update(body)
        yield [b"group", head, seal.digest() + body]
    for said in ([], 3, {}, {"sender": 1, "number": "x"}, {"sender": "x", "number": 1 << 70}):
        yield [b"look", json.dumps(said).encode()]
    for kept in ([None], "ab", {"a": 1}, [1 << 70]):
        yield [b"look", json.dumps({"sender": "x", "number": 1, "kept": kept}).encode()]
    for ordinal in (-1, True, "5", 1.5, None, 1 << 70):
        said = {"sender": "x", "number": 1, "ordinal": ordinal}
        yield [b"group", json.dumps(said).encode(), payload]
    yield [b"look", b"[" * 100_000]
    for _ in range(300):
        damaged = bytearray(payload)
        place = int(generator.integers(len(damaged)))
        damaged[place : place + 3] = generator.bytes(int(generator.integers(5)))
        yield [b"group", head, bytes(damaged)]
        yield [generator.bytes(int(generator.integers(9))) for _ in range(generator.integers(1, 5))]


def test_a_hostile_peer_gets_nothing_unpickled_and_stops_nobody():
    async def body():
        buffer = buffer_of()
        async with RolloutReceiver(buffer, ANY, max_group_bytes=1 << 20) as receiver:
            context = zmq.asyncio.Context()
            socket = context.socket(zmq.DEALER)
            socket.connect(receiver.address)
            for message in _hostile(np.random.default_rng(0)):
                await socket.send_multipart(message)
            while receiver.refused < 300:
                await asyncio.sleep(0.01)
            large = context.socket(zmq.DEALER)
            large.connect(receiver.address)
            await large.send_multipart([b"group", b"{}", bytes(2 << 20)])
            async with RolloutSender(receiver.address) as sender:
                await sender.put(make_group(5), timeout_s=HANG_S)
                (came,) = await buffer.take(1, version=2, timeout_s=HANG_S)
                receiver.settle(came)
                await sender.settled(timeout_s=HANG_S)
            assert len(buffer) == 0
            context.destroy(linger=0)

    run(body())


def _send(address, first, count):
    async def body():
        async with RolloutSender(address, capacity_bytes=4096, retry_s=0.05) as sender:
            for ordinal in range(first, first + count):
                await sender.put(make_group(ordinal), timeout_s=HANG_S)
                print(ordinal, file=sys.stderr, flush=True)
            await sender.settled(timeout_s=HANG_S)

    asyncio.run(body())


def _train(address, seen, steps):
    """Take and settle groups; write each to a file before it is settled."""

    async def body():
        buffer = buffer_of(capacity=2)
        async with RolloutReceiver(buffer, address) as receiver:
            with open(seen, "a") as file:
                for _ in range(steps):
                    groups = await buffer.take(1, version=2, timeout_s=HANG_S)
                    file.writelines(f"{each.ordinal}\n" for each in groups)
                    file.flush()
                    receiver.settle(*groups)
                await asyncio.sleep(1)  # The last answers.

    asyncio.run(body())


def test_receivers_that_are_killed_lose_no_acknowledged_group(tmp_path, full):
    generator = np.random.default_rng(0)
    kills = 100 if full else 3
    address, seen = f"ipc://{tmp_path}/socket", tmp_path / "seen"
    many = max(300, 25 * kills)  # Far more than the kills wait for.
    senders = [PROCESSES.Process(target=_send, args=(address, many * i, many)) for i in range(2)]
    for each in senders:
        each.start()
    for _ in range(kills):
        trainer = PROCESSES.Process(target=_train, args=(address, seen, 10 * many))
        trainer.start()
        before = len(seen.read_text().split()) if seen.exists() else 0
        wait = before + int(generator.integers(3, 20))
        while len(seen.read_text().split() if seen.exists() else ()) < wait:
            assert trainer.is_alive()
            trainer.join(0.01)
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.join(HANG_S)
    trainer = PROCESSES.Process(target=_train, args=(address, seen, 10 * many))
    trainer.start()
    for each in senders:
        each.join(HANG_S)
        assert each.exitcode == 0  # All of its groups are settled.
    trainer.kill()
    trainer.join(HANG_S)
    ordinals = [int(each) for each in seen.read_text().split()]
    assert {*ordinals} == {many * i + j for i in range(2) for j in range(many)}
    # A sender sends again what it had not heard to be settled when the receiver died. Of that, what
    # the buffer had as it last heard (2), one in hand and the one put since may have been written.
    most = len(senders) * (2 + 1 + 1)
    assert len(ordinals) - len({*ordinals}) <= most * kills


def test_a_killed_sender_loses_only_what_was_not_accepted():
    async def body():
        buffer = buffer_of(capacity=3)
        async with RolloutReceiver(buffer, ANY) as receiver:
            sender = PROCESSES.Process(target=_send, args=(receiver.address, 0, 3))
            sender.start()
            while len(buffer) < 3:
                await asyncio.sleep(0.01)
            sender.kill()
            taken = await buffer.take(3, version=2, timeout_s=HANG_S)
            assert [each.ordinal for each in taken] == [0, 1, 2]
            # A worker in its place makes a group that was accepted already: it is known.
            async with RolloutSender(receiver.address) as again:
                await again.put(make_group(2), timeout_s=HANG_S)
                receiver.settle(*taken)
                await again.settled(timeout_s=HANG_S)
            assert len(buffer) == 0

    run(body())


def test_a_group_that_found_the_queue_full_follows_the_next_answer(monkeypatch):
    """It does not wait for the next retry."""

    async def body():
        receiver, full = RolloutReceiver(buffer_of(), ANY), [True]
        async with receiver, RolloutSender(receiver.address, retry_s=0.02) as sender:
            await sender.put(make_group(0), timeout_s=HANG_S)
            send, sender._retry_s = sender._wire.send, 10 * HANG_S
            monkeypatch.setattr(
                sender._wire,
                "send",
                lambda frames: not (frames[0] == b"group" and full and full.pop()) and send(frames),
            )
            puts = (sender.put(make_group(number), timeout_s=HANG_S) for number in (1, 2))
            await asyncio.gather(*puts)
            assert not full

    run(body())
