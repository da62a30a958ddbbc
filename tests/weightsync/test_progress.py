"""The progress of a publish: bytes of this rank, after each bucket."""

import pytest
import torch

from primeblocks.errors import TransferError
from primeblocks.weightsync import Publisher, SharedMemoryTransport, describe, plan_sync
from tests.deadlines import HANG_S as TIMEOUT_S


@pytest.fixture
def weights():
    return {name: torch.arange(64.0) for name in "abc"}


@pytest.fixture
def publisher(weights, tmp_path):
    source = describe(weights)
    plan = plan_sync([source], source.whole(), bucket_bytes=256)
    with (
        SharedMemoryTransport("policy", owner=True, root=str(tmp_path)) as transport,
        Publisher(plan, weights, transport, full_every=16) as publisher,
    ):
        yield publisher


def test_bytes_are_told_bucket_by_bucket_also_of_deltas(weights, publisher):
    for version in range(2):
        told = []
        publisher.publish(version, timeout_s=TIMEOUT_S, progress=lambda *at: told.append(at))  # noqa: B023
        assert told == [(256, 768), (512, 768), (768, 768)]
        weights["a"][0] += 1


def test_an_error_of_progress_ends_the_publish_and_a_retry_succeeds(publisher):
    def broken(done, total):
        raise KeyError(done)

    with pytest.raises(TransferError, match="KeyError: 256"):
        publisher.publish(0, timeout_s=TIMEOUT_S, progress=broken)
    assert publisher.publish(0, timeout_s=TIMEOUT_S).version == 0
