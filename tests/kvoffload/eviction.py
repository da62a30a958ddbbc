"""Histories of a tier, and its ledger again as plain lists that are searched from end to end."""

from dataclasses import dataclass, field

from hypothesis import strategies as st

from primeblocks.kvoffload import PageKey

CAPACITY = 4

numbers = st.integers(0, 5)
versions = st.none() | st.integers(0, 3)
keys = st.builds(lambda n, v: PageKey("", bytes([n]), version=v), numbers, versions)
names = st.none() | st.integers(0, 3)
steps = st.one_of(
    st.tuples(st.just("use"), keys, names),
    st.tuples(st.just("use"), keys, names),
    st.tuples(st.just("end"), names),
    st.tuples(st.just("remove"), keys),
    st.tuples(st.just("advance")),
)
histories = st.lists(steps, max_size=60)


@dataclass
class Page:
    key: PageKey
    last_used: int = 0
    filed: int = 0
    rollouts: set | None = None
    alone: bool = False  # one rollout when it was last used

    @property
    def version(self):
        return self.key.version

    @property
    def ended(self):
        return self.rollouts == set()


@dataclass
class Plain:
    """All pages, and for each rollout its pages in the order in which they came."""

    pages: list = field(default_factory=list)
    chains: dict = field(default_factory=dict)
    tick: int = 0
    filed: int = 0

    def find(self, key):
        return next((page for page in self.pages if page.key == key), None)

    def file(self, page):
        self.filed += 1
        page.filed = self.filed

    def use(self, key, rollout):
        page = self.find(key)
        if page is None:
            page = Page(key)
            self.pages.append(page)
        self.tick += 1
        page.last_used = self.tick
        if rollout is not None:
            page.rollouts = (page.rollouts or set()) | {rollout}
            chain = self.chains.setdefault(rollout, [])
            if key not in chain:
                chain.append(key)
        page.alone = page.rollouts is not None and len(page.rollouts) == 1
        self.file(page)

    def end(self, rollout):
        for key in self.chains.pop(rollout, []):
            page = self.find(key)
            page.rollouts.discard(rollout)
            if page.ended:
                self.file(page)

    def remove(self, key):
        self.pages = [page for page in self.pages if page.key != key]
        for chain in self.chains.values():
            if key in chain:
                chain.remove(key)

    def tail(self, page):
        if page.rollouts is None or len(page.rollouts) != 1:
            return page.key
        (rollout,) = page.rollouts
        last = self.find(self.chains[rollout][-1])
        return last.key if last.rollouts == page.rollouts else page.key


def play(history, ledger, plain, victims):
    """Play a history on both; `victims(version)` gives both answers, (key, demote), when full."""
    version = 0
    for step, *what in history:
        if step == "advance":
            version += 1
        elif step == "end":
            ledger.end(*what)
            plain.end(*what)
        elif step == "remove":
            ledger.remove(*what)
            plain.remove(*what)
        else:
            key, rollout = what
            if plain.find(key) is None:
                ledger.arrive(key)
                if len(plain.pages) == CAPACITY:
                    ours, theirs = victims(version)
                    assert ours == theirs
                    ledger.evicted(ours[0])
                    plain.remove(ours[0])
            ledger.touch(key, rollouts=() if rollout is None else (rollout,))
            plain.use(key, rollout)
