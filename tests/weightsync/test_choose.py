"""Which version a reader takes, and over which others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import TransferError
from primeblocks.weightsync.marker import Marker
from primeblocks.weightsync.transports.transport import chain_to, choose


def marker(version, base=None, run="r"):
    return Marker.make(run=run, version=version, plan="", base=base, sizes=(), buckets=())


FOUR, FIVE = marker(4), marker(5)


@pytest.mark.parametrize(
    ("markers", "version", "served", "chosen"),
    [
        ((), None, None, None),
        ((FOUR, FIVE), None, None, FIVE),
        ((FOUR, FIVE), None, FOUR, FIVE),
        ((FOUR, FIVE), None, FIVE, None),
        ((FOUR, FIVE), None, marker(6), None),
        ((FOUR, FIVE), None, marker(6, run="of a dead trainer"), FIVE),
        ((FOUR, FIVE), 4, FIVE, FOUR),
        ((FOUR, FIVE), 5, FIVE, FIVE),
        ((FOUR, FIVE), 6, None, None),
        ((), 6, None, None),
    ],
)
def test_the_newest_is_taken_or_the_one_asked_for(markers, version, served, chosen):
    assert choose(markers, version, served=served) == chosen


def test_what_was_retired_is_refused():
    with pytest.raises(
        TransferError, match=r"version 3 was retired. The transport has the versions \[4, 5\]"
    ):
        choose((FOUR, FIVE), 3, served=None)


CHAIN = (marker(1), marker(2, 1), marker(3, 2), marker(4), marker(5, 4), marker(6, 5))


@pytest.mark.parametrize(
    ("wanted", "held", "versions"),
    [
        (6, None, [4, 5, 6]),
        (6, marker(5, 4), [6]),
        (6, marker(4), [5, 6]),
        (6, marker(3, 2), [4, 5, 6]),
        (6, marker(5, 4, run="of a dead trainer"), [4, 5, 6]),
        (4, marker(3, 2), [4]),
        (3, marker(1), [2, 3]),
        (3, marker(5, 4), [1, 2, 3]),
    ],
)
def test_the_way_is_from_what_is_held_or_from_a_full_version(wanted, held, versions):
    chain = chain_to(CHAIN[wanted - 1], CHAIN, held=held)
    assert [one.version for one in chain] == versions


def test_a_way_that_is_cut_is_refused():
    with pytest.raises(TransferError, match="delta from version 4, which was retired"):
        chain_to(CHAIN[5], CHAIN[4:], held=None)
    assert chain_to(CHAIN[5], CHAIN[4:], held=CHAIN[3]) == CHAIN[4:]


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.data())
def test_every_way_applies_deltas_in_order_to_what_they_are_deltas_to(full, data):
    markers = [marker(0)]
    for version, whole in enumerate(full, 1):
        markers.append(marker(version, None if whole else version - 1))
    wanted = data.draw(st.sampled_from(markers))
    held = data.draw(st.none() | st.sampled_from(markers))
    has = None if held is None else held.version
    for one in chain_to(wanted, markers, held=held):
        assert one.base in (None, has)
        has = one.version
    assert has == wanted.version
