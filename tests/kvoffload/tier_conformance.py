"""What every tier below host memory does. Each file of a tier runs `CHECKS` over it:

@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_conformance(check, bench):
    check(bench)
"""

import threading
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from primeblocks.errors import CapacityError, PrimeblocksError
from primeblocks.kvoffload import HostTier, PageKey
from primeblocks.kvoffload.page import checksum
from primeblocks.kvoffload.tier import Found, Record
from tests.deadlines import HANG_S

__all__ = [
    "CHECKS",
    "EXTRA",
    "PAGE",
    "Bench",
    "check_name",
    "content_of",
    "host_for",
    "is_error",
    "key_of",
]

PAGE, EXTRA = 5000, 600


def host_for(frames=24):
    """Frames that the checks write from and read into."""
    return HostTier(capacity_bytes=frames * 8192, page_bytes=PAGE, attachment_bytes=EXTRA)


def key_of(number, **fields):
    return PageKey("salt", number.to_bytes(4, "big"), **fields)


@dataclass
class Bench:
    """A tier of pages of PAGE and EXTRA bytes, and the host tier above it.

    Args:
        room: pages that fit for sure.
        too_many: pages that do not fit together; at most 24 less than the frames of `host`.
    """

    host: HostTier
    tier: object
    room: int
    too_many: int

    def record(self, key, content, frame=0):
        room = self.host.frame(frame)
        room[:] = 255
        room[: len(content)] = np.frombuffer(content, np.uint8)
        held = room[: len(content)]
        return Record(key, held, checksum(key, held), room)

    def put(self, *pairs):
        """(key, content) each; the answers."""
        return self.tier.put([self.record(*pair, frame) for frame, pair in enumerate(pairs)])

    def get(self, *keys):
        """The content where the digest says that it is right, else what `get` answered."""
        into = [self.host.frame(frame) for frame in range(len(keys))]
        for frame in into:
            frame[:] = 170
        answers = []
        for key, frame, found in zip(keys, into, self.tier.get(keys, into=into), strict=True):
            right = (
                isinstance(found, Found) and checksum(key, frame[: found.length]) == found.digest
            )
            answers.append(frame[: found.length].tobytes() if right else found)
        return answers


def content_of(number, extra=0):
    return np.random.default_rng(number).bytes(PAGE + extra)


def pages(count):
    return [(key_of(number), content_of(number, number * 7 % EXTRA)) for number in range(count)]


def pages_come_back_as_they_were(bench):
    given_ = pages(min(bench.room, 20))
    given_[0] = (given_[0][0], content_of(99, EXTRA))
    assert bench.put(*given_) == [None] * len(given_)
    keys = [key for key, _ in given_]
    assert bench.get(*keys) == [content for _, content in given_]
    assert bench.get(*reversed(keys)) == [content for _, content in reversed(given_)]
    assert bench.tier.holds(keys) == [True] * len(keys)
    if not bench.tier.shared:
        assert bench.tier.keys() == keys


def hits_and_misses_answer_in_their_places(bench):
    (one, first), (two, _), (three, third) = pages(3)
    assert bench.put((one, first), (three, third)) == [None, None]
    asked, contents = [two, three, two, one, three], [None, third, None, first, third]
    assert bench.get(*asked) == contents
    assert bench.tier.holds(asked) == [content is not None for content in contents]


def nothing_asked_is_nothing_done(bench):
    assert bench.tier.put([]) == []
    assert bench.tier.get([], into=[]) == []
    assert bench.tier.holds([]) == []
    bench.tier.drop([])
    bench.tier.flush()


def a_page_of_the_same_key_takes_its_place(bench):
    key, first, second = key_of(1), content_of(1, 30), content_of(2, 3)
    assert bench.put((key, first)) == [None]
    assert bench.put((key, second)) == [None]
    # Where others write too, the page of a key is the same page, and the first may stay.
    assert bench.get(key)[0] in ([first, second] if bench.tier.shared else [second])
    if not bench.tier.shared:
        assert bench.tier.keys() == [key]


def dropped_pages_are_gone_and_may_return(bench):
    given_ = pages(3)
    keys = [key for key, _ in given_]
    bench.put(*given_)
    bench.tier.drop([keys[1], key_of(77), keys[1]])
    assert bench.tier.holds(keys) == [True, False, True]
    assert bench.get(*keys) == [given_[0][1], None, given_[2][1]]
    again = content_of(50)
    assert bench.put((keys[1], again)) == [None]
    assert bench.get(keys[1]) == [again]


def nothing_is_left_of_a_cleared_tier(bench):
    given_ = pages(3)
    keys = [key for key, _ in given_]
    bench.put(*given_)
    bench.tier.clear()
    assert bench.get(*keys) == [None] * 3
    assert bench.tier.holds(keys) == [False] * 3
    assert bench.tier.keys() == []
    assert bench.put(given_[1]) == [None]
    assert bench.get(*keys) == [None, given_[1][1], None]


def every_field_of_a_key_tells_pages_apart(bench):
    keys = [
        PageKey("salt", b"h"),
        PageKey(b"salt", b"h"),
        PageKey("sal", b"th"),
        PageKey("salt", b"h", group=1),
        PageKey("salt", b"h", version=0),
        PageKey("salt", b"h", version=-1),
        PageKey("salt", b"h", recipe="fp8"),
    ]
    for number, key in enumerate(keys):
        assert bench.get(*keys[number:]) == [None] * (len(keys) - number)
        assert bench.put((key, content_of(number))) == [None]
    assert bench.get(*keys) == [content_of(number) for number in range(len(keys))]


def a_full_tier_says_so_and_keeps_what_it_has(bench):
    if not bench.tier.shared:
        bench.put(*pages(bench.tier.capacity_pages))
    answers, kept = [], []
    for key, content in pages(bench.too_many):
        (answer,) = bench.put((key, content))
        assert answer is None or isinstance(answer, CapacityError)
        answers.append(answer)
        kept += [(key, content)] if answer is None else []
    assert any(answers)
    found = [bench.get(key)[0] for key, _ in kept]
    # A shared store evicts by itself, but has something in the end.
    assert all(each in (content, None) for each, (_, content) in zip(found, kept, strict=True))
    assert any(found) if bench.tier.shared else all(found)


def others_may_ask_meanwhile(bench):
    given_ = pages(min(bench.room, 12))
    keys = [key for key, _ in given_]
    over, wrong = threading.Event(), []

    def ask():
        while not over.is_set():
            held = bench.tier.holds(keys)
            if len(held) != len(keys):
                wrong.append(held)
            if not bench.tier.shared and not 0 <= len(bench.tier) <= len(keys):  # a disk
                wrong.append(len(bench.tier))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            assert not any(bench.put(*given_))
            assert bench.get(*keys) == [content for _, content in given_]
            bench.tier.drop(keys[::2])
    finally:
        over.set()
        for thread in threads:
            thread.join(HANG_S)
    assert not wrong


def what_it_does_is_what_a_dictionary_does(bench):
    number = st.integers(0, min(bench.room, 6) - 1)
    step = st.tuples(st.sampled_from(["put", "get", "drop", "holds", "clear"]), st.lists(number))

    @settings(max_examples=30, suppress_health_check=list(HealthCheck))
    @given(st.lists(step, max_size=12))
    def run(steps):
        bench.tier.clear()
        model = {}
        for stamp, (what, numbers) in enumerate(steps):
            chosen = numbers[:20]
            keys = [key_of(each) for each in chosen]
            if what == "put":
                batch = {key: content_of(each + 10 * stamp) for key, each in zip(keys, chosen)}  # noqa: B905
                assert not any(bench.put(*batch.items()))
                for key, content in batch.items():
                    before = model.get(key, set()) if bench.tier.shared else set()
                    model[key] = before | {content}
            elif what == "get":
                for key, got in zip(keys, bench.get(*keys), strict=True):
                    assert got in model.get(key, {None})
            elif what == "holds":
                assert bench.tier.holds(keys) == [key in model for key in keys]
            elif what == "drop":
                bench.tier.drop(keys)
                for key in keys:
                    model.pop(key, None)
            else:
                bench.tier.clear()
                model.clear()

    run()


def it_is_closed_once(bench):
    bench.put(*pages(2))
    bench.tier.close()
    bench.tier.close()


CHECKS = [
    pages_come_back_as_they_were,
    hits_and_misses_answer_in_their_places,
    nothing_asked_is_nothing_done,
    a_page_of_the_same_key_takes_its_place,
    dropped_pages_are_gone_and_may_return,
    nothing_is_left_of_a_cleared_tier,
    every_field_of_a_key_tells_pages_apart,
    a_full_tier_says_so_and_keeps_what_it_has,
    others_may_ask_meanwhile,
    what_it_does_is_what_a_dictionary_does,
    it_is_closed_once,
]


def check_name(check):
    return check.__name__


def is_error(answer):
    """Whether an answer says why not."""
    return isinstance(answer, PrimeblocksError | OSError)
