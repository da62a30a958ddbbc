"""Threads that share a publisher or a reader are refused, or wait."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from primeblocks.errors import ClosedError, UsageError
from primeblocks.testing.oracles import assert_same_bits
from primeblocks.weightsync import Publisher, SharedMemoryTransport, Subscriber, describe, plan_sync

TIMEOUT_S = 120


def test_a_publish_beside_another_one_is_refused(tmp_path):
    weights, met = {"w": torch.arange(64.0)}, []
    source = describe(weights)
    plan = plan_sync([source], source.whole(), bucket_bytes=64)

    def encode(name, tensor):
        """In the middle of a publish, publish again: from this thread, and from another one."""
        if not met:
            publisher.close() if closes else None
            for act in (lambda f: f(), lambda f: pool.submit(f).result(120)):
                with pytest.raises(ClosedError if closes else UsageError) as caught:
                    act(lambda: publisher.publish(9, timeout_s=TIMEOUT_S))
                met.append(str(caught.value))
        return {name: tensor}

    got = {}
    root = str(tmp_path)
    with (
        SharedMemoryTransport("policy", owner=True, root=root) as transport,
        ThreadPoolExecutor(1) as pool,
    ):
        for closes, expected in ((False, [0, 1]), (True, [0, 1, 2])):
            publisher = Publisher(plan, weights, transport, encode=encode, full_every=4)
            publisher.publish(0 if not closes else 2, timeout_s=TIMEOUT_S)
            if not closes:
                assert all("publish(9) was called while another call" in text for text in met)
                publisher.publish(1, timeout_s=TIMEOUT_S)
            assert [marker.version for marker in transport.markers()][-1] == expected[-1]
            assert len(met) == 2
            met.clear()
        with Subscriber(plan, got.update, transport) as subscriber:
            assert subscriber.receive(timeout_s=TIMEOUT_S).version == 2
            assert_same_bits(got["w"], weights["w"])


@pytest.mark.parametrize("call", ["receive", "verify", "close"])
def test_a_call_in_the_middle_of_a_load_is_refused_or_waits(tmp_path, call):
    weights, got = {"w": torch.arange(64.0), "b": torch.ones(3)}, {}
    source = describe(weights)
    plan = plan_sync([source], source.whole(), bucket_bytes=64)

    def load(tensors):
        for name, tensor in tensors:
            if call == "close":
                pool.submit(subscriber.close).result(TIMEOUT_S)
            else:
                with pytest.raises(UsageError, match=f"{call}.. was called while another call"):
                    pool.submit(getattr(subscriber, call), timeout_s=TIMEOUT_S).result(TIMEOUT_S)
            got[name] = tensor.clone()

    with (
        SharedMemoryTransport("policy", owner=True, root=str(tmp_path)) as transport,
        Publisher(plan, weights, transport) as publisher,
        Subscriber(plan, load, transport) as subscriber,
        ThreadPoolExecutor(1) as pool,
    ):
        publisher.publish(0, timeout_s=TIMEOUT_S)
        assert subscriber.receive(timeout_s=TIMEOUT_S).version == 0
        for name, tensor in weights.items():
            assert_same_bits(got[name], tensor)
        if call == "close":
            with pytest.raises(ClosedError):
                subscriber.receive(timeout_s=TIMEOUT_S)
        else:
            publisher.publish(1, timeout_s=TIMEOUT_S)
            assert subscriber.receive(timeout_s=TIMEOUT_S).version == 1
