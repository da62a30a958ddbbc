"""The version that deltas are applied to stays whole until the next one was loaded."""

import pytest

from primeblocks.errors import DeadlineError, TransferError
from primeblocks.weightsync import fetched
from tests.weightsync.test_delta_faults import Setup


@pytest.fixture
def setup(tmp_path):
    setup = Setup("file", tmp_path, full_every=100)
    with setup.transport, setup.subscriber:
        setup.publish(0)
        setup.receive()
        yield setup


@pytest.mark.parametrize("deltas_before", [0, 2])
@pytest.mark.parametrize("bucket", [1, 4])
def test_a_delta_that_ends_halfway_leaves_its_base(setup, monkeypatch, deltas_before, bucket):
    for version in range(1, 1 + deltas_before):
        setup.publish(version)
        setup.receive()
    apply, done = fetched.apply_payloads, []

    def late(*args):
        digest = apply(*args)
        done.append(digest)
        if len(done) == bucket:
            raise DeadlineError("late")
        return digest

    size = setup.publish(deltas_before + 1).bytes
    with monkeypatch.context() as patch:
        patch.setattr(fetched, "apply_payloads", late)
        with pytest.raises(DeadlineError, match="late"):
            setup.receive()
    assert setup.serves(deltas_before)
    assert setup.receive().bytes == size  # The delta alone.
    assert setup.serves(deltas_before + 1)


def test_after_loads_that_failed_the_same_base_is_used(setup):
    for version in range(1, 5):
        size = setup.publish(version).bytes
        setup.fail_at[len(setup.versions)] = True
        with pytest.raises(TransferError, match=f"Version {version - 1} was loaded again"):
            setup.receive()
        assert setup.serves(version - 1)
        assert setup.receive().bytes == size
        assert setup.serves(version)


def test_deltas_in_a_row_take_turns_in_two_places(setup):
    places = []
    setup.engine = lambda given: places.extend(t.data_ptr() for name, t in given if name == "a")
    for version in range(1, 9):
        setup.publish(version)
        setup.receive()
    assert len(places) == 8
    assert len(set(places)) == 2
