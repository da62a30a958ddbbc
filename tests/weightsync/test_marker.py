import pytest

from primeblocks.errors import CorruptionError
from primeblocks.weightsync.marker import Marker

MARKER = Marker.make(run="r", version=7, plan="p", base=6, sizes=(12, 3), buckets=("aa", "bb"))


def test_a_marker_survives_json():
    assert Marker.from_json(MARKER.to_json()) == MARKER
    assert MARKER.size_bytes == 15


def test_every_flipped_byte_is_noticed():
    text = MARKER.to_json().encode()
    for i in range(len(text)):
        broken = bytearray(text)
        broken[i] ^= 1
        with pytest.raises(CorruptionError):
            assert Marker.from_json(bytes(broken)) == MARKER


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"buckets": 3}', MARKER.to_json()[:-9]])
def test_what_is_no_marker_is_refused(text):
    with pytest.raises(CorruptionError):
        Marker.from_json(text)
