"""Frames: every free one once, in the order of the sweep, under any history."""

from hypothesis import given
from hypothesis import strategies as st

from primeblocks.kvoffload.disk.data import Frames


@given(
    count=st.integers(1, 12),
    steps=st.lists(
        st.tuples(st.sampled_from(["claim", "release", "fence", "clear"]), st.integers(0, 14))
    ),
)
def test_claims_are_the_next_free_frames_of_the_sweep(count, steps):
    frames, taken, head, fence = Frames(count), set(), 0, count
    for step, number in steps:
        if step == "claim":
            order = [*range(head, count), *range(head)]
            free = [frame for frame in order if frame not in taken]
            near = [frame for frame in free if frame < fence]
            head = near[-1] + 1 if len(near) < number and near else head
            far = [frame for frame in [*range(head, count), *range(head)] if frame in free]
            free = [*near, *(frame for frame in far if frame >= fence)][:number]
            assert frames.claim(number) == free
            taken |= {*free}
            fence = count if any(frame >= fence for frame in free) else fence
            head = free[-1] + 1 if free else head
        elif step == "release" and number in taken:
            frames.release([number])
            taken.remove(number)
        elif step == "fence":
            frames.fence(number)
            head, fence = 0, min(number, count)
        elif step == "clear":
            frames.clear()
            taken, head, fence = set(), 0, count
        assert frames.free == count - len(taken)
        assert frames.end() == max(taken, default=-1) + 1


def test_a_sweep_goes_on_behind_the_newest_page():
    frames = Frames(5)
    frames.adopt([3, 1])
    assert frames.claim(9) == [2, 4, 0]


def test_frames_behind_a_fence_lift_it_once_they_are_taken():
    frames = Frames(4)
    frames.fence(1)
    assert frames.claim(3) == [0, 1, 2]
    frames.release(range(3))
    assert frames.claim(1) == [3]  # with the fence it would be 0


def test_clear_lifts_a_fence():
    frames = Frames(4)
    frames.fence(1)
    frames.clear()
    assert frames.claim(1) == [0]
    frames.release([0])
    assert frames.claim(1) == [1]
