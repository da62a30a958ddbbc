"""Histories of a tier, and its ledger again as plain lists that are searched from end to end."""

from dataclasses import dataclass, field

from hypothesis import strategies as st

from primeblocks.kvoffload import PageKey
from primeblocks.kvoffload.evict.reuse import BACK, Reuse

CAPACITY = 2
ROLLOUTS = 2  # no more than pages, so that those without pages are remembered
WRITES = ("writes", None)

numbers = st.integers(0, 5)
versions = st.none() | st.integers(0, 3)
keys = st.builds(lambda n, v: PageKey("", bytes([n]), version=v), numbers, versions)
names = st.integers(1, ROLLOUTS)
users = st.lists(names, max_size=2, unique=True).map(tuple)
uses = st.tuples(st.just("use"), keys, users, st.booleans(), st.booleans())
steps = st.one_of(
    uses,
    uses,
    st.tuples(st.just("wait"), names, st.sampled_from(["tool", "queue"])),
    st.tuples(st.just("end"), names),
    st.tuples(st.just("remove"), keys),
    st.tuples(st.just("advance")),
)
histories = st.lists(steps, max_size=60)


def long_history(random, *, steps=400):
    """Long enough for the ledger to learn from."""
    history = []
    for _ in range(steps):
        key = PageKey("", bytes([random.randrange(6)]), version=random.choice([None, 2]))
        users = tuple(random.sample(range(1, ROLLOUTS + 1), random.randrange(ROLLOUTS + 1)))
        others = [
            ("wait", random.randint(1, ROLLOUTS), random.choice(["tool", "queue"])),
            ("end", random.randint(1, ROLLOUTS)),
            ("remove", key),
        ]
        used = ("use", key, users, random.random() < 0.3, random.random() < 0.3)
        history.append(random.choices([used, *others], [12, 3, 1, 1])[0])
    return history


@dataclass
class Page:
    key: PageKey
    last_used: int = 0
    users: set | None = None
    place: int = 0  # among the pages of its sort

    @property
    def version(self):
        return self.key.version

    @property
    def sort(self):
        return (
            "unnamed"
            if self.users is None
            else ("ended", "own", "several")[min(len(self.users), 2)]
        )


@dataclass
class Rollout:
    since: int
    phase: tuple = WRITES
    place: int = 0  # among the rollouts of its phase


@dataclass
class Plain:
    """All pages and all rollouts; whoever moves gets the next place, or the one in front of all."""

    pages: list = field(default_factory=list)
    rollouts: dict = field(default_factory=dict)
    chains: dict = field(default_factory=dict)  # of each rollout, its pages as it met them
    left: dict = field(default_factory=dict)
    waits: Reuse = field(default_factory=Reuse)
    shared: Reuse = field(default_factory=Reuse)
    tick: int = 0
    moves: int = 0

    def find(self, key):
        return next((page for page in self.pages if page.key == key), None)

    def own(self, name):
        return [page for page in self.pages if page.users == {name}]

    def next_place(self, *, front=False):
        self.moves += 1
        return -self.moves if front else self.moves

    def use(self, key, users, *, first_alone, front):
        self.tick += 1
        page = self.find(key)
        sort, last_used, before = "unnamed", None, None
        if page is None:
            if key in self.left:
                sort, last_used = self.left.pop(key)
            page = Page(key)
            self.pages.append(page)
        else:
            sort, last_used, before = page.sort, page.last_used, set(page.users or ())
        if last_used is not None and sort != "own" and not front:
            self.shared.add(sort, self.tick - last_used, then=BACK)
        page.last_used = self.tick
        for name in users:
            self.rollouts.setdefault(name, Rollout(self.tick))
            self.chains.setdefault(name, {}).setdefault(key)
        held = {name for name in self.rollouts if self.own(name)}
        old = page.sort if before is not None else None
        if users:
            page.users = (page.users or set()) | set(users)
        if page.sort != "own" or old != "own" or front:
            page.place = self.next_place(front=front and page.sort == "own")
        self.enter(held)
        for name in () if front else users[:1] if first_alone else users:
            again = last_used is not None if before is None else name in before
            rollout = self.rollouts[name]
            if rollout.phase != WRITES:
                begins = again
            else:
                begins = again and sort == "own" and last_used >= rollout.since
            if begins:
                self.begin(name, WRITES, BACK)

    def enter(self, held):
        """Rollouts that have own pages again come last."""
        for name, rollout in self.rollouts.items():
            if name not in held and self.own(name):
                rollout.place = self.next_place()

    def begin(self, name, phase, then):
        rollout = self.rollouts[name]
        self.waits.add(rollout.phase, self.tick - rollout.since, then=then)
        self.rollouts[name] = Rollout(self.tick, phase, self.next_place())

    def wait(self, name, what):
        self.rollouts.setdefault(name, Rollout(self.tick))
        self.begin(name, ("waits", what), ("waits", what))

    def end(self, name):
        rollout = self.rollouts.pop(name, None)
        if rollout is None:
            return
        self.waits.add(rollout.phase, self.tick - rollout.since, then=None)
        for page in map(self.find, self.chains.pop(name, ())):
            held = {other for other in self.rollouts if self.own(other)}
            page.users.discard(name)
            page.place = self.next_place(front=page.sort == "own")
            self.enter(held)

    def remove(self, key):
        self.pages = [page for page in self.pages if page.key != key]
        for chain in self.chains.values():
            chain.pop(key, None)

    def evicted(self, key):
        page = self.find(key)
        if page.sort != "ended":
            self.left[key] = page.sort, page.last_used
            if len(self.left) > 4 * CAPACITY:
                sort, last_used = self.left.pop(next(iter(self.left)))
                if sort != "own":
                    self.shared.add(sort, self.tick - last_used, then=None)
        self.remove(key)

    def live(self):
        """(worth, since, key) of all that may be chosen among live pages."""
        found = []
        for sort in ("several", "unnamed"):
            pages = [page for page in self.pages if page.sort == sort]
            if pages:
                page = min(pages, key=lambda page: page.place)
                worth = self.shared.worth(sort, self.tick - page.last_used)
                found.append((worth, page.last_used, page.key))
        for phase in {rollout.phase for rollout in self.rollouts.values()}:
            lane = [n for n, r in self.rollouts.items() if r.phase == phase and self.own(n)]
            lane.sort(key=lambda name: self.rollouts[name].place)
            for name in {*lane[:1], *lane[-1:]}:
                rollout = self.rollouts[name]
                last = max(self.own(name), key=lambda page: page.place)
                worth = self.waits.worth(phase, self.tick - rollout.since)
                found.append((worth, rollout.since, last.key))
        return sorted(found, key=order)


def order(live):
    worth, since, key = live
    return worth, since, key.hash, str(key.version)


def play(history, ledger, plain, victims):
    """Play a history on both; `victims(version)` gives both answers, (key, demote), when full."""
    version = 0
    for step, *what in history:
        if step == "advance":
            version += 1
        elif step == "end":
            ledger.end(*what)
            plain.end(*what)
        elif step == "wait":
            ledger.wait(*what)
            plain.wait(*what)
        elif step == "remove":
            ledger.remove(*what)
            plain.remove(*what)
        else:
            key, users, first_alone, front = what
            if plain.find(key) is None:
                ledger.arrive(key)
                if len(plain.pages) == CAPACITY:
                    ours, theirs = victims(version)
                    assert ours == theirs
                    ledger.evicted(ours[0])
                    plain.evicted(ours[0])
            by = users[:1] if first_alone else None
            ledger.touch(key, rollouts=users, by=by, front=front)
            plain.use(key, users, first_alone=first_alone, front=front)
        assert len(ledger) == len(plain.pages)
        seen = [(live.worth, live.since, live.page.key) for live in ledger.snapshot(version=0).live]
        assert sorted(seen, key=order) == plain.live()
