"""Frames: every free one once, in the order of the sweep, under any history."""

from hypothesis import given
from hypothesis import strategies as st

from primeblocks.kvoffload.disk.frames import Frames


@given(
    count=st.integers(1, 12),
    steps=st.lists(
        st.tuples(st.sampled_from(["claim", "release", "rewind", "clear"]), st.integers(0, 14))
    ),
)
def test_claims_are_the_next_free_frames_of_the_sweep(count, steps):
    frames, taken, head = Frames(count), set(), 0
    for step, number in steps:
        if step == "claim":
            order = [*range(head, count), *range(head)]
            free = [frame for frame in order if frame not in taken][:number]
            assert frames.claim(number) == free
            taken |= {*free}
            head = free[-1] + 1 if free else head
        elif step == "release" and number in taken:
            frames.release(number)
            taken.remove(number)
        elif step == "rewind":
            frames.rewind()
            head = 0
        elif step == "clear":
            frames.clear()
            taken, head = set(), 0
        assert frames.free == count - len(taken)


def test_a_sweep_goes_on_behind_the_newest_page():
    frames = Frames(5)
    frames.take(3)
    frames.take(1)
    assert frames.claim(9) == [2, 4, 0]
