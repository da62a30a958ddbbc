"""Histories of a tier, and its ledger again as plain lists that are searched from end to end."""

from dataclasses import dataclass, field

from hypothesis import strategies as st

from primeblocks.kvoffload import PageKey
from primeblocks.kvoffload.evict.ledger import Waits

ROLLOUTS = 3

numbers = st.integers(0, 6)
versions = st.none() | st.integers(0, 3)
keys = st.builds(lambda n, v: PageKey("", bytes([n]), version=v), numbers, versions)
names = st.integers(1, ROLLOUTS)
users = st.lists(names, max_size=2, unique=True).map(tuple)
uses = st.tuples(st.just("use"), keys, users, st.booleans(), st.booleans())
steps = st.one_of(
    uses,
    uses,
    st.tuples(st.just("pause"), names, st.sampled_from(["tool", "test"])),
    st.tuples(st.just("resume"), names),
    st.tuples(st.just("queue"), st.lists(names | st.just("unknown"), unique=True)),
    st.tuples(st.just("end"), names),
    st.tuples(st.just("remove"), keys),
    st.tuples(st.just("advance"), st.integers(1, 3)),
)
histories = st.lists(steps, max_size=60)


def long_history(random, *, steps=400):
    """Long enough for means to matter."""
    history = []
    for _ in range(steps):
        key = PageKey("", bytes([random.randrange(7)]), version=random.choice([None, 2]))
        name = random.randint(1, ROLLOUTS)
        users = tuple(random.sample(range(1, ROLLOUTS + 1), random.randrange(3)))
        others = [
            ("pause", name, random.choice(["tool", "test"])),
            ("resume", name),
            ("queue", random.sample(range(1, ROLLOUTS + 1), random.randrange(ROLLOUTS + 1))),
            ("end", name),
            ("remove", key),
        ]
        used = ("use", key, users, random.random() < 0.3, random.random() < 0.3)
        history.append(random.choices([used, *others], [12, 3, 1, 1, 1, 1])[0])
    return history


@dataclass
class Page:
    key: PageKey
    last_used: int = 0
    users: set | None = None
    place: int = 0  # among the pages of its sort

    @property
    def sort(self):
        if self.users is None:
            return "unnamed"
        return ("ended", "own", "shared")[min(len(self.users), 2)]


@dataclass
class Rollout:
    since: int
    state: tuple = ("runs", None)
    place: int = 0  # among the rollouts of its state


@dataclass
class Plain:
    """All pages and all rollouts; whoever moves gets the next place, or the one in front of all."""

    pages: list = field(default_factory=list)
    rollouts: dict = field(default_factory=dict)
    line: dict = field(default_factory=dict)  # places in the queue, as they were told
    waits: Waits = field(default_factory=Waits)
    chains: dict = field(default_factory=dict)  # of each rollout, its pages as it met them
    served: int = 0
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
        old = None
        if page is None:
            page = Page(key)
            self.pages.append(page)
        else:
            old = page.sort
        page.last_used = self.tick
        held = {name for name in self.rollouts if self.own(name)}
        for name in users:
            if name not in self.rollouts:
                state = ("queues", None) if name in self.line else ("runs", None)
                self.rollouts[name] = Rollout(self.tick, state)
            self.chains.setdefault(name, {}).setdefault(key)
            page.users = (page.users or set()) | {name}
        if page.sort != "own" or old != "own" or front:
            page.place = self.next_place(front=front and page.sort == "own")
        self.enter(held)
        for name in () if front else users[:1] if first_alone else users:
            self.resume(name)

    def enter(self, held):
        """Rollouts that have own pages again come last."""
        for name, rollout in self.rollouts.items():
            if name not in held and self.own(name):
                rollout.place = self.next_place()

    def move(self, name, state):
        rollout = self.rollouts[name]
        if rollout.state[0] == "waits" and state[0] != "waits":
            self.waits.add(rollout.state[1], self.tick - rollout.since)
        self.rollouts[name] = Rollout(self.tick, state, self.next_place())

    def resume(self, name):
        if name in self.rollouts and name not in self.line:
            self.move(name, ("runs", None))

    def pause(self, name, reason):
        rollout = self.rollouts.setdefault(name, Rollout(self.tick))
        self.line.pop(name, None)
        if rollout.state != ("waits", reason):
            self.move(name, ("waits", reason))
            if rollout.state[0] == "waits":
                self.rollouts[name].since = rollout.since

    def queue(self, names):
        served = [name for name in self.line if name not in names]
        for _ in served:
            self.waits.add_service((self.tick - self.served) / len(served))
        if served or not self.line:
            self.served = self.tick
        self.line = {name: place for place, name in enumerate(names)}
        for name in (*served, *names):
            state = "queues" if name in names else "runs"
            if name in self.rollouts and self.rollouts[name].state[0] != state:
                self.move(name, (state, None))

    def end(self, name):
        self.line.pop(name, None)
        if self.rollouts.pop(name, None) is None:
            return
        for page in map(self.find, reversed(self.chains.pop(name, {}))):
            held = {other for other in self.rollouts if self.own(other)}
            page.users.discard(name)
            if page.sort != "shared":
                page.place = self.next_place(front=page.sort == "own")
            self.enter(held)

    def remove(self, key):
        self.pages = [page for page in self.pages if page.key != key]
        for chain in self.chains.values():
            chain.pop(key, None)

    def live(self):
        """(state, since, position, expected, key) of each that may be chosen."""
        found = []
        for state in {rollout.state for rollout in self.rollouts.values()}:
            lane = [n for n, r in self.rollouts.items() if r.state == state and self.own(n)]
            if not lane:
                continue
            queues = state[0] == "queues"
            name = max(lane, key=self.line.get) if queues else self.first(lane)
            rollout = self.rollouts[name]
            position = self.line[name] if queues else 0
            expected = self.waits.service(position + 1)
            if not queues:
                expected = self.waits.expected(
                    state[1],
                    age=self.tick - rollout.since,
                    queue=len(self.line) + 1,
                    runs=state[0] == "runs",
                )
            last = max(self.own(name), key=lambda page: page.place)
            found.append((state[0], rollout.since, position, expected, last.key))
        return sorted(found, key=str)

    def first(self, lane):
        return min(lane, key=lambda name: self.rollouts[name].place)

    def oldest(self, sort):
        pages = [page for page in self.pages if page.sort == sort]
        return min(pages, key=lambda page: page.place).key if pages else None


def play(history, ledger, plain, check, *, capacity):
    """Play a history on both; `check(version)` compares them, and names who leaves when full."""
    version = 0
    for step, *what in history:
        if step == "advance":
            version += what[0]
        elif step != "use":
            getattr(ledger, step)(*what)
            getattr(plain, step)(*what)
        else:
            key, users, first_alone, front = what
            if plain.find(key) is None and len(plain.pages) == capacity:
                victim = check(version)
                ledger.remove(victim)
                plain.remove(victim)
            by = users[:1] if first_alone else None
            ledger.touch(key, rollouts=users, by=by, front=front)
            plain.use(key, users, first_alone=first_alone, front=front)
        assert len(ledger) == len(plain.pages)
        if plain.pages:
            check(version)
