"""ARC against the paper's Figure 4, written with lists."""

from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from primeblocks.kvoffload import PageKey
from primeblocks.kvoffload.evict import arc
from primeblocks.kvoffload.evict.ledger import Ledger


class Paper:
    """Lists in the order of use, the least recent first."""

    def __init__(self, c):
        self.c, self.p = c, 0.0
        self.t1, self.t2, self.b1, self.b2 = [], [], [], []

    def replace(self, x):
        big = len(self.t1) > self.p
        if self.t1 and (big or (x in self.b2 and len(self.t1) == self.p)):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))

    def request(self, x):
        """Returns whether it was a hit."""
        for resident in (self.t1, self.t2):
            if x in resident:
                resident.remove(x)
                self.t2.append(x)
                return True
        if x in self.b1:
            self.p = min(self.p + max(1, len(self.b2) / len(self.b1)), self.c)
            self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:
            self.p = max(self.p - max(1, len(self.b1) / len(self.b2)), 0)
            self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
        else:
            self.make_room(x)
            self.t1.append(x)
        return False

    def make_room(self, x):
        recent, total = len(self.t1) + len(self.b1), self.t1 + self.t2 + self.b1 + self.b2
        if recent == self.c:
            if len(self.t1) < self.c:
                self.b1.pop(0)
                self.replace(x)
            else:
                self.t1.pop(0)
        elif len(total) >= self.c:
            if len(total) == 2 * self.c:
                self.b2.pop(0)
            self.replace(x)


@example(1, [1, 1, 0, 1, 0])  # A page used once leaves a full tier for one that returns.
@given(st.integers(1, 5), st.lists(st.integers(0, 9), max_size=120))
def test_arc_keeps_what_the_paper_keeps(capacity, requests):
    compare(capacity, requests)


@pytest.mark.parametrize("capacity", [3, 8, 16])
def test_arc_keeps_what_the_paper_keeps_where_the_target_moves(capacity):
    """Pages used often, between scans of many others, in phases."""
    random, requests = Random(capacity), []
    for phase in range(12):
        often = random.randrange(1, capacity + 4)
        requests += [random.randrange(often) for _ in range(60)]
        requests += [random.randrange(30, 30 + 2 * capacity) for _ in range(40 * (phase % 3))]
    assert compare(capacity, requests) > 3


def compare(capacity, requests):
    """Step by step; returns how many targets there were."""
    targets = set()
    paper, ledger, held = Paper(capacity), Ledger(capacity_pages=capacity), set()
    for number in requests:
        key = PageKey("", bytes([number]), version=number % 2)
        assert paper.request(number) == (number in held)
        if number not in held:
            ledger.arrive(key)
            if len(held) == capacity:
                victim, demote = ledger.victim(arc, version=0)
                assert demote
                ledger.evicted(victim)
                held.remove(victim.hash[0])
            held.add(number)
        ledger.touch(key)
        assert held == {*paper.t1, *paper.t2}
        seen = ledger.snapshot(version=0)
        assert (seen.once_target, seen.once_pages) == (paper.p, len(paper.t1))
        targets.add(paper.p)
    return len(targets)
