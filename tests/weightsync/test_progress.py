"""The progress of a publish, of a receive and of a comparison, in bytes."""

import itertools
import os
import traceback

import pytest
import torch

from primeblocks.errors import TransferError
from primeblocks.weightsync import (
    Publisher,
    Subscriber,
    describe,
    fetched,
    load_into,
    plan_sync,
    verify_engine,
)
from primeblocks.weightsync.convert import record_wiring
from primeblocks.weightsync.plan import Bucket
from tests.deadlines import HANG_S as TIMEOUT_S
from tests.weightsync.contents import flip_sent

SIZE = 520  # Of the two tensors of `setup`, in buckets of at most 64 bytes.


class Told(list):
    """What a call told, as (done, total). `ends` checks it."""

    def __call__(self, done, total):
        self.append((done, total))

    def ends(self, total):
        assert self[-1] == (total, total)
        assert all(one[0] < after[0] <= after[1] for one, after in itertools.pairwise(self))


def failing(at):
    """Return a function that raises the number of each call from one call on."""
    calls = itertools.count(1)

    def broken(done, total):
        if (call := next(calls)) >= at:
            raise KeyError(call)

    return broken


def test_bytes_are_told_bucket_by_bucket_also_of_deltas(setup):
    publisher = Publisher(setup.plan, setup.weights, setup.transport, full_every=16)
    ends = [*itertools.accumulate(bucket.bytes for bucket in setup.plan.buckets)]
    for version in range(2):
        told = Told()
        publisher.publish(version, timeout_s=TIMEOUT_S, progress=told)
        assert told == [(end, SIZE) for end in ends]
        setup.weights["b"][0] += 1


def test_progress_costs_the_same_for_each_bucket(setup, monkeypatch):
    reads, size_of = [], Bucket.bytes.fget
    monkeypatch.setattr(Bucket, "bytes", property(lambda one: reads.append(one) or size_of(one)))
    counts = []
    for version, told in enumerate([None, Told()]):
        reads.clear()
        setup.publisher.publish(version, timeout_s=TIMEOUT_S, progress=told)
        counts.append(len(reads))
    assert len(setup.plan.buckets) > 8
    assert counts[1] - counts[0] <= 2 * len(setup.plan.buckets)


def test_a_bucket_that_is_filled_for_each_reader_is_told_once(setup):
    class Twice:
        def __getattr__(self, name):
            return getattr(setup.transport, name)

        def send(self, outgoing, *, deadline):
            setup.transport.send(outgoing, deadline=deadline)
            outgoing.digest_all()

    setup.publisher._transport, told = Twice(), Told()
    setup.publisher.publish(0, timeout_s=TIMEOUT_S, progress=told)
    told.ends(SIZE)


def test_an_error_of_progress_ends_the_publish_and_a_retry_succeeds(setup):
    with pytest.raises(TransferError, match="KeyError: 1"):
        setup.publisher.publish(0, timeout_s=TIMEOUT_S, progress=failing(1))
    assert setup.publisher.publish(0, timeout_s=TIMEOUT_S).version == 0


@pytest.fixture(params=[1, 4])
def threads(request, monkeypatch):
    monkeypatch.setattr(fetched, "_BYTES_A_THREAD", SIZE // request.param + 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(request.param)})


@pytest.mark.usefixtures("threads")
def test_every_byte_is_told_when_it_is_checked_and_when_it_is_loaded(setup):
    setup.publish(1)
    told = Told()
    setup.subscriber.receive(timeout_s=TIMEOUT_S, progress=told)
    told.ends(2 * SIZE)
    assert [total for _, total in told] == [2 * SIZE] * len(told)
    steps = [after[0] - one[0] for one, after in itertools.pairwise([(0, 0), *told])]
    buckets = [bucket.bytes for bucket in setup.plan.buckets]
    assert steps == [*buckets, 480, 40]
    told = Told()
    setup.subscriber.receive(timeout_s=TIMEOUT_S, version=1, progress=told)
    assert not told  # It is loaded.


def test_what_verify_told_is_not_told_again(setup):
    setup.publish(1)
    told = Told()
    setup.subscriber.verify(timeout_s=TIMEOUT_S, progress=told)
    told.ends(SIZE)
    told = Told()
    setup.subscriber.receive(timeout_s=TIMEOUT_S, progress=told)
    told.ends(SIZE)


def test_bytes_that_are_fetched_again_are_told_again(setup):
    setup.publish(1)
    setup.receive()
    setup.publish(2)
    real, told = setup.transport.receive, Told()

    def mended(request):
        flip_sent(setup.transport, setup.path, 2, -260)  # In the middle.
        return real(request)

    setup.transport.receive = mended  # Damaged at the first time, and whole at the second.
    setup.subscriber.receive(timeout_s=TIMEOUT_S, progress=told)
    last, total = told[-1]
    assert last == total > 2 * SIZE
    again = [last] * (len(setup.plan.buckets) + 2)  # Of the second time, and of the load.
    assert [total for _, total in told] == [2 * SIZE] * (len(told) - len(again)) + again
    assert setup.served() == 2
    assert all(one[0] < after[0] <= after[1] for one, after in itertools.pairwise(told))


def test_of_a_delta_the_bytes_of_the_whole_are_told(setup):
    publisher = Publisher(setup.plan, setup.weights, setup.transport, full_every=16)
    for version in range(2):
        publisher.publish(version, timeout_s=TIMEOUT_S)
        setup.weights["b"][0] += 1
        told = Told()
        receipt = setup.subscriber.receive(timeout_s=TIMEOUT_S, progress=told)
        told.ends(2 * SIZE)
    assert receipt.bytes < SIZE


def test_bytes_are_told_once_where_a_load_checks_them(setup):
    held = {name: torch.zeros_like(tensor) for name, tensor in setup.weights.items()}
    load = load_into(held, setup.plan)
    with Subscriber(setup.plan, load, setup.transport, check="ahead") as subscriber:
        for version in (1, 2):
            setup.publish(version)
            told = Told()
            subscriber.receive(timeout_s=TIMEOUT_S, progress=told)
            told.ends(SIZE * (3 - version))  # The first has nothing to go back to.
    assert (held["a"] == 2).all()


def test_of_converted_tensors_the_bytes_of_the_results_are_told(setup):
    source = describe(setup.weights)

    def pad(tensors):
        return {"a": torch.cat([tensors["a"], torch.zeros(2, 3)])}

    wiring = record_wiring(pad, source)
    plan = plan_sync([source], wiring, bucket_bytes=64)
    told = Told()
    with (
        Publisher(plan, setup.weights, setup.transport) as publisher,
        Subscriber(plan, setup.engine.load, setup.transport, convert=wiring) as subscriber,
    ):
        publisher.publish(1, timeout_s=TIMEOUT_S)
        subscriber.receive(timeout_s=TIMEOUT_S, progress=told)
    told.ends(plan.read_bytes(0) + 504)


def test_an_error_of_progress_before_the_load_leaves_the_engine_and_a_retry_succeeds(setup):
    setup.publish(1)
    setup.receive()
    setup.publish(2)
    with pytest.raises(KeyError) as caught:
        setup.subscriber.receive(timeout_s=TIMEOUT_S, progress=failing(2))
    assert traceback.extract_tb(caught.tb)[-1].name == "broken"
    assert (setup.subscriber.version, setup.served()) == (1, 1)
    assert setup.receive().version == 2


def test_an_error_of_progress_in_a_load_is_raised_after_the_load(setup):
    for version in (1, 2):  # Also of the first, which has nothing to go back to.
        setup.publish(version)
        at = len(setup.plan.buckets) + 1
        with pytest.raises(KeyError, match=f"^{at}$") as caught:
            setup.subscriber.receive(timeout_s=TIMEOUT_S, progress=failing(at))
        assert traceback.extract_tb(caught.tb)[-1].name == "broken"
        assert (setup.subscriber.version, setup.served()) == (version, version)
    assert setup.engine.loads == 2
    told = Told()
    setup.publish(3)
    setup.subscriber.receive(timeout_s=TIMEOUT_S, progress=told)
    told.ends(2 * SIZE)


def test_going_back_is_not_told(setup):
    setup.publish(1)
    setup.receive()
    setup.publish(2)
    setup.engine.fail_at = {2: 1}
    told = Told()
    with pytest.raises(TransferError, match="Version 1 was loaded again"):
        setup.subscriber.receive(timeout_s=TIMEOUT_S, progress=told)
    assert told[-1] == (SIZE + 480, 2 * SIZE)  # One tensor of the new version, before it failed.


@pytest.mark.parametrize("planned", [False, True])
def test_a_comparison_tells_the_bytes_compared_and_an_error_ends_it(setup, planned):
    setup.publish(1)
    setup.receive()
    more = {"plan": setup.plan} if planned else {}
    told = Told()
    found = verify_engine(setup.weights, setup.engine.serves, progress=told, **more)
    assert found.is_proved
    told.ends(SIZE)
    assert len(told) == (len(setup.plan.buckets) if planned else 2)
    with pytest.raises(KeyError) as caught:
        verify_engine(setup.weights, setup.engine.serves, progress=failing(2), **more)
    assert traceback.extract_tb(caught.tb)[-1].name == "broken"
