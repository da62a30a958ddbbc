"""Slots: every free one once, in the order of the sweep, under any history."""

from hypothesis import given
from hypothesis import strategies as st

from primeblocks.kvoffload.disk.slots import Slots


@given(
    count=st.integers(1, 12),
    steps=st.lists(
        st.tuples(st.sampled_from(["claim", "release", "rewind", "clear"]), st.integers(0, 14))
    ),
)
def test_claims_are_the_next_free_slots_of_the_sweep(count, steps):
    slots, taken, head = Slots(count), set(), 0
    for step, number in steps:
        if step == "claim":
            order = [*range(head, count), *range(head)]
            free = [slot for slot in order if slot not in taken][:number]
            assert slots.claim(number) == free
            taken |= {*free}
            head = free[-1] + 1 if free else head
        elif step == "release" and number in taken:
            slots.release(number)
            taken.remove(number)
        elif step == "rewind":
            slots.rewind()
            head = 0
        elif step == "clear":
            slots.clear()
            taken, head = set(), 0
        assert slots.free == count - len(taken)


def test_a_sweep_goes_on_behind_the_newest_page():
    slots = Slots(5)
    slots.take(3)
    slots.take(1)
    assert slots.claim(9) == [2, 4, 0]
