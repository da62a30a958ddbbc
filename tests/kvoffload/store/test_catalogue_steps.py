"""One step at a time: what each move does to frames, counts and the next tier."""

from primeblocks.errors import CorruptionError
from primeblocks.kvoffload.catalogue import Catalogue
from primeblocks.kvoffload.evict import VersionAware, lru
from primeblocks.kvoffload.moves import (
    Ask,
    CopyIn,
    CopyOut,
    Drop,
    HostPage,
    LoadRequest,
    PageRead,
    Recalled,
    SaveRequest,
    Write,
)
from primeblocks.testing.faults import ManualClock
from tests.kvoffload.store.calls import key_of, level_of


class Steps:
    """A catalogue whose moves are all done at once, but for those that are held back."""

    def __init__(self, frames, *levels, **how):
        how = {"evict": lru, "max_pending": 8, "through": False} | how
        self.answers = {}
        self.done = []
        self.catalogue = Catalogue(
            frames=frames, levels=levels, answer=self.answers.__setitem__, **how
        )

    def save(self, *numbers, users=(), hold=()):
        requests = [SaveRequest(key_of(number), 10 + number, users) for number in numbers]
        for request in requests:
            self.catalogue.save([request])
        return requests, self.settle(hold)

    def load(self, number, users=(), hold=(), shared=(), damaged=False):
        request = LoadRequest(key_of(number), users)
        self.catalogue.load([request])
        return request, self.settle(hold, shared=shared, damaged=damaged)

    def settle(self, hold=(), *, shared=(), damaged=False):
        held = []
        for _ in range(100):
            moves = self.catalogue.take()
            if not moves:
                return held
            for move in moves:
                if hold and isinstance(move, hold):
                    held.append(move)
                else:
                    self.done.append(move)
                    self.do(move, shared, damaged)
        raise AssertionError("moves without end")

    def do(self, move, shared, damaged):
        match move:
            case CopyIn():
                self.catalogue.copied_in(move, copied=True)
            case CopyOut():
                self.catalogue.copied_out(move)
            case Write():
                self.catalogue.written(move, None)
            case PageRead() if damaged:
                self.catalogue.read(move, length=0, error=CorruptionError("a flipped bit"))
            case PageRead():
                self.catalogue.read(move, length=10 + move.page.key.hash[0])
            case Ask():
                self.catalogue.asked(move, held=move.request.key.hash[0] in shared)

    def count(self, name):
        return self.catalogue.statistics()[name]

    def writes(self):
        return [move.page.key.hash[0] for move in self.done if isinstance(move, Write)]


def disk(*numbers, **how):
    return level_of(numbers, **how)


def common():
    return level_of(name="common", shared=True)


def test_a_frame_given_back_goes_to_who_waits_at_once():
    for act in (lambda steps: steps.catalogue.clear(), lambda steps: steps.save(1, hold=Write)):
        steps = Steps(2, disk(), max_pending=1)
        steps.save(0, 1)
        (waits,), _ = steps.save(2, hold=Write)
        assert waits not in steps.answers
        act(steps)
        steps.settle(Write)
        assert steps.answers[waits] is not None


def test_a_save_looks_at_no_page_that_a_hung_tier_holds(monkeypatch):
    looks, busy = [], HostPage.busy
    monkeypatch.setattr(HostPage, "busy", property(lambda page: looks.append(1) or busy.fget(page)))
    counts = []
    for held in (2, 14):
        clock = ManualClock()
        level = level_of(pages=200, clock=clock.now)
        steps = Steps(32, level, max_pending=held)
        steps.save(*range(32 + held), hold=Write)
        clock.advance(2)
        steps.catalogue.settle()
        steps.settle(Write)
        assert level.breaker.silent()
        assert level.breaker.writing > held
        looks.clear()
        for number in range(100, 120):
            (request,), _ = steps.save(number, hold=Write)
            assert steps.answers[request].stored
        counts.append(len(looks))
    assert counts[0] == counts[1]


def test_a_superseded_save_is_not_stored():
    steps = Steps(2)
    (old,), (copy,) = steps.save(0, hold=CopyIn)
    (new,), _ = steps.save(0)
    steps.catalogue.copied_in(copy, copied=True)
    assert (steps.answers[old].stored, steps.answers[new].stored) == (False, True)


def test_who_waited_for_a_save_that_was_given_up_looks_below():
    steps = Steps(2, common())
    _, (copy,) = steps.save(0, hold=CopyIn)
    load, _ = steps.load(0)
    steps.catalogue.copied_in(copy, copied=False)
    steps.settle(shared={0})
    assert steps.count("common").hits == 1
    assert load.tier == "common"


def test_what_a_shared_tier_has_is_not_written_to_it_again():
    steps = Steps(1, common(), through=True)
    steps.save(0, 1)
    steps.load(5, shared={5})
    steps.save(2)
    assert steps.writes() == [0, 1, 2]
    back = Steps(1, common())
    back.load(5, shared={5})
    back.save(1, 2)
    assert back.writes() == [1]


def test_damage_in_every_tier_is_a_miss_in_each():
    below = disk(0), disk(0, name="second")
    steps = Steps(2, *below, common())
    load, _ = steps.load(0, shared={0}, damaged=True)
    assert steps.answers[load] is None
    for name in ("disk", "second", "common"):
        count = steps.count(name)
        assert (count.misses, count.checksum_failures) == (1, 1), name
    assert steps.count("disk").pages == 0


def test_a_read_that_was_taken_back_leaves_the_page_where_it_is():
    steps = Steps(4, disk(1))
    request, (read,) = steps.load(1, hold=PageRead)
    steps.catalogue.read(read, length=0, error=Recalled("hangs"))
    steps.settle()
    assert steps.answers[request] is None
    assert not any(isinstance(move, Drop) for move in steps.done)
    assert steps.catalogue.levels[0].found(key_of(1))


def test_each_tier_counts_what_it_did():
    steps = Steps(1, disk(5), common())
    steps.save(0, 1)  # 0 goes down, to both
    steps.load(1)
    steps.load(5)
    steps.load(6, shared={6})
    steps.load(7)
    host, below, shared = (steps.count(name) for name in ("host", "disk", "common"))
    assert (host.hits, host.misses, host.bytes_read) == (1, 3, 11)
    assert (host.stores, host.bytes_written) == (4, 10 + 11 + 15 + 16)
    assert (below.hits, below.misses, below.bytes_read) == (1, 2, 15)
    assert (below.stores, below.bytes_written) == (2, 21)
    assert (shared.hits, shared.misses, shared.bytes_read) == (1, 1, 16)
    assert (below.evictions, below.failures, below.pages) == (0, 0, 3)


def rollouts(ledger, number):
    return set(ledger.rollouts(key_of(number)))


def test_rollouts_go_down_and_up_with_their_pages():
    below = disk(evict=VersionAware(9))
    steps = Steps(1, below, evict=VersionAware(9))
    host = steps.catalogue._ledger
    steps.save(0, users=("one",))
    steps.load(0, users=("two",))
    assert rollouts(host, 0) == {"one", "two"}
    steps.save(1)
    assert rollouts(below.ledger, 0) == {"one", "two"}
    steps.load(0, users=("three",))
    assert rollouts(host, 0) == rollouts(below.ledger, 0) == {"one", "two", "three"}
    steps.load(1, users=("four",))
    assert rollouts(host, 1) == {"four"}
    steps.catalogue.end("two")
    assert rollouts(below.ledger, 0) == {"one", "three"}


def test_a_page_that_is_saved_from_leaving_keeps_its_rollouts():
    below = disk(evict=VersionAware(9))
    steps = Steps(1, below, evict=VersionAware(9))
    steps.save(0, users=("one",))
    _, (write,) = steps.save(1, hold=Write)
    steps.load(0, users=("two",), hold=Write)
    steps.catalogue.written(write, None)
    assert rollouts(below.ledger, 0) == {"one", "two"}


def test_a_rollout_ends_once_for_a_page_that_leaves_again():
    steps = Steps(1, disk(evict=VersionAware(9)), evict=VersionAware(9))
    host = steps.catalogue._ledger
    steps.save(0, users=("one",))
    steps.save(1, hold=Write)  # For which page 0 has to leave, again and again.
    steps.catalogue.end("one")
    for users, left in ((), set()), (("one",), {"one"}), ((), {"one"}):
        _, (copy,) = steps.load(0, users, hold=CopyOut)
        assert rollouts(host, 0) == left
        steps.catalogue.copied_out(copy)
        steps.settle(Write)


def test_a_page_whose_first_write_is_under_way_is_not_written_twice():
    steps = Steps(1, disk(pages=2), through=True)
    _, (write,) = steps.save(0, hold=Write)
    _, more = steps.save(1, hold=Write)
    assert more == []
    steps.catalogue.written(write, None)
    _, held = steps.save(2, hold=Write)
    assert [each.page.key for each in held] == [key_of(1)]


def test_one_page_in_sixteen_is_written_before_its_frame_is_needed():
    steps = Steps(32, disk(pages=64))
    steps.save(*range(32))
    assert steps.writes() == [0, 1]
    _, held = steps.save(40, 41, hold=Write)
    assert len(held) == 2  # the copies of the new pages did not wait for them
    assert steps.catalogue.statistics()["host"].stores == 34


def test_a_page_of_a_shared_tier_has_the_rollout_that_asked():
    steps = Steps(1, common(), evict=VersionAware(9))
    steps.load(5, users=("one",), shared={5})
    assert rollouts(steps.catalogue._ledger, 5) == {"one"}
