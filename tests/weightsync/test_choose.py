"""The versions from which a reader gets to the version that it takes, and its wait for them."""

import time
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks import weightsync
from primeblocks.errors import DeadlineError, TransferError
from primeblocks.testing.faults import ManualClock
from primeblocks.weightsync import rendezvous
from primeblocks.weightsync.marker import Marker
from primeblocks.weightsync.transports import transport
from primeblocks.weightsync.transports.transport import ReceiveRequest, await_versions, chain_to
from tests.deadlines import HANG_S


def marker(version, base=None, run="r"):
    return Marker.make(run=run, version=version, plan="", base=base, sizes=(), buckets=())


def test_a_way_that_is_cut_is_refused():
    chain = (marker(5, 4), marker(6, 5))
    with pytest.raises(TransferError, match="delta from version 4, which was retired"):
        chain_to(chain[1], chain, held=None)
    assert chain_to(chain[1], chain, held=marker(4)) == chain


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.data())
def test_every_way_applies_deltas_in_order_to_what_they_are_deltas_to(full, data):
    markers = [marker(0)]
    for version, whole in enumerate(full, 1):
        markers.append(marker(version, None if whole else version - 1))
    wanted = data.draw(st.sampled_from(markers))
    of_a_dead_trainer = [marker(each.version, run="dead") for each in markers]
    held = data.draw(st.sampled_from([None, *markers, *of_a_dead_trainer]))
    has = None if held is None or held.run == "dead" else held.version
    chain = chain_to(wanted, markers, held=held)
    assert len(chain) == 1 or chain[1].base is not None  # The shortest way.
    for one in chain:
        assert one.base in (None, has)
        has = one.version
    assert has == wanted.version


@pytest.mark.parametrize("look_s", [0.002, 0.02, 0.1])
@pytest.mark.parametrize("what", ["version", "plan"])
def test_idle_readers_look_less_and_less_often(what, look_s, monkeypatch):
    """A thousand readers may share one store, or read one large file."""
    clock, looks = ManualClock(), []

    def look(*_, **__):
        looks.append(clock.now())
        return () if what == "version" else None

    commits = SimpleNamespace(look_s=look_s, look=look, markers=look, hint=str)
    event = SimpleNamespace(Event=lambda: SimpleNamespace(wait=clock.advance))
    monkeypatch.setattr(time, "monotonic", clock.now)
    monkeypatch.setattr(transport, "threading", event)
    monkeypatch.setattr(rendezvous, "threading", event)
    waits = {
        "version": partial(
            await_versions, commits, ReceiveRequest(None, 0, None, None, None, HANG_S)
        ),
        "plan": partial(weightsync.find, SimpleNamespace(commits=commits), timeout_s=HANG_S),
    }
    with pytest.raises(DeadlineError):
        waits[what]()
    assert looks[1] - looks[0] == pytest.approx(look_s)
    assert len(looks) < HANG_S / 0.25 + 12
    assert looks[-1] == pytest.approx(HANG_S)
