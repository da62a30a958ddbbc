"""A catalogue whose copies and I/O happen in any order that real threads could take."""

from collections import deque

from primeblocks.errors import CapacityError, CorruptionError
from primeblocks.kvoffload.catalogue import Catalogue
from primeblocks.kvoffload.lower import Level
from primeblocks.kvoffload.moves import (
    Ask,
    Clear,
    CopyIn,
    CopyOut,
    Drop,
    HostState,
    LoadRequest,
    PageRead,
    Recall,
    Recalled,
    SaveRequest,
    Write,
)
from primeblocks.testing.faults import ManualClock

UNKNOWN = object()


class Disk:
    """A lower tier: a dictionary, with moves that wait for it.

    Args:
        pages: its quota.
        really: pages that fit; changed while it runs.
    """

    def __init__(self, pages, *, shared=False, really=None):
        self.name = f"disk {id(self)}"
        self.pages = {}
        self.capacity_pages = pages
        self.really = really
        self.shared = shared
        self.hangs = False

    def keys(self):
        return [] if self.shared else list(self.pages)


class Simulation:
    """One store. Every load gets what its key named at some time between its call and its end."""

    def __init__(self, random, *, frames, disks, evict, through=False, max_pending=8):
        self.random = random
        self.disks = disks
        self.clock = ManualClock()
        self.levels = [Level(disk, evict, patience_s=1.0, clock=self.clock.now) for disk in disks]
        self.flushes = []
        self.catalogue = Catalogue(
            frames=frames,
            levels=self.levels,
            evict=evict,
            max_pending=max_pending,
            through=through,
            answer=self.answer,
        )
        self.frames = [None] * frames
        self.copies = []
        self.reads = [[] for _ in disks]
        self.ordered = [deque() for _ in disks]
        self.named = {}  # what each key names
        self.allowed = {}  # load -> what it may get
        self.outcomes = {}
        self.given_up = set()
        self.values = 0

    # Callers.

    def save(self, keys, *, users=()):
        requests = []
        for key in keys:
            self.values += 1
            self.names(key, self.values)
            requests.append(SaveRequest(key, 1, users, self.values))
        self.catalogue.save(requests)
        return requests

    def save_value(self, key, value, *, users=()):
        """As `save`; a key of shared tiers always names the same value."""
        self.names(key, value)
        self.catalogue.save([SaveRequest(key, 1, users, value)])

    def names(self, key, value):
        self.named[key] = value
        for load, allowed in self.allowed.items():
            if load.key == key and load not in self.outcomes:
                allowed.add(value)

    def load(self, key, *, users=()):
        request = LoadRequest(key, users)
        self.allowed[request] = {self.named.get(key)}
        self.catalogue.load([request])
        return request

    def clear(self):
        self.named.clear()
        self.catalogue.clear()

    def answer(self, request, outcome):
        assert request not in self.outcomes, "answered twice"
        self.outcomes[request] = outcome

    # The threads.

    def choices(self):
        """Every step that some thread could take next. Moves follow from one result, or several."""
        if self.random.random() < 0.3 and (steps := self.begun()):
            return steps
        self.take()
        return self.begun()

    def begun(self):
        steps = [(self.copy, self.copies, n) for n in range(len(self.copies))]
        for depth, reads in enumerate(self.reads):
            if self.disks[depth].hangs:
                continue
            steps += [(self.read, reads, n) for n in range(len(reads))]
            if self.ordered[depth]:
                steps.append((self.do, self.ordered[depth], depth))
        return steps

    def step(self):
        steps = self.choices()
        if steps:
            act, queue, where = self.random.choice(steps)
            act(queue, where)
            self.check()
        return bool(steps)

    def take(self):
        while moves := self.catalogue.take():
            for move in moves:
                if isinstance(move, CopyIn | CopyOut):
                    self.copies.append(move)
                elif isinstance(move, Recall):
                    self.recall(move.depth)
                elif isinstance(move, PageRead | Ask):
                    self.reads[move.depth].append(move)
                else:
                    self.ordered[move.depth].append(move)

    def recall(self, depth):
        for queue in (self.reads[depth], self.ordered[depth]):
            for move in [each for each in queue if isinstance(each, PageRead | Write)]:
                queue.remove(move)
                if isinstance(move, Write):
                    self.catalogue.written(move, Recalled("hangs"))
                else:
                    self.catalogue.read(move, length=0, error=Recalled("hangs"))

    def hang(self):
        """A tier answers nothing for longer than the store's patience: saves go on."""
        disk = self.random.choice(self.disks)
        disk.hangs = True
        while self.step():
            self.clock.advance(self.random.choice([0, 0, 0.5]))
        self.clock.advance(1.5)
        self.catalogue.settle()
        while self.step():
            pass
        assert not self.catalogue._waiting, "a page waits for a tier that hangs"
        disk.hangs = False

    def fill(self):
        """A tier has room for more pages than before, or for fewer."""
        self.random.choice(self.disks).really = self.random.choice([None, 0, 1, 2, 3])

    def rest(self):
        self.clock.advance(self.random.choice([0.3, 1.5, 40.0]))
        self.catalogue.settle()

    def flush(self):
        """Every page that host memory has is below, or the caller hears that one is not."""
        pages = self.catalogue._pages.items()
        here = {key: page for key, page in pages if page.state is not HostState.COMING}
        before = [level.refusals for level in self.levels]
        error = self.catalogue.write_down()
        self.take()
        # A tier that others write to may lose pages at any time.
        if self.disks and error is None and not any(disk.shared for disk in self.disks):
            frames = {key: self.frames[page.frame] for key, page in here.items()}
            flush = {"pages": frames, "before": before, "left": len(self.disks), "below": {}}
            for queue in self.ordered:
                queue.append(flush)

    def flushed(self, flush, depth):
        for key, value in self.disks[depth].pages.items():
            flush["below"].setdefault(key, set()).add(value)
        flush["refused"] = flush.get("refused", False) or (
            self.levels[depth].refusals > flush["before"][depth]
        )
        flush["left"] -= 1
        if flush["left"] == 0 and not flush["refused"]:
            self.flushes.append(flush)
            for key, value in flush["pages"].items():
                below = flush["below"].get(key, set())
                assert value in below or UNKNOWN in below, f"{key} was flushed and is not there"

    def copy(self, queue, n):
        move = queue.pop(n)
        if isinstance(move, CopyIn):
            copied = move.request not in self.given_up
            if copied:
                self.frames[move.page.frame] = move.request.batch
            self.catalogue.copied_in(move, copied=copied)
            return
        assert move.page.pins > 0
        if move.request not in self.given_up:
            self.answer(move.request, self.frames[move.page.frame])
        self.catalogue.copied_out(move)

    def read(self, queue, n):
        move = queue.pop(n)
        disk = self.disks[move.depth]
        if isinstance(move, Ask):
            self.catalogue.asked(move, held=move.request.key in disk.pages)
            return
        found = disk.pages.get(move.page.key)
        if found is UNKNOWN:
            self.catalogue.read(move, length=0, error=CorruptionError("a flipped bit"))
        elif found is None:
            self.catalogue.read(move, length=0, error=None)
        else:
            self.frames[move.page.frame] = found
            self.catalogue.read(move, length=1)

    def do(self, queue, depth):
        move, disk = queue.popleft(), self.disks[depth]
        match move:
            case dict():
                self.flushed(move, depth)
            case Write():
                error = OSError("refused") if self.random.random() < 0.05 else None
                if disk.really is not None and len(disk.pages) >= disk.really:
                    error = CapacityError("full")
                if error is None:
                    disk.pages[move.page.key] = self.frames[move.page.frame]
                    assert disk.shared or len(disk.pages) <= disk.capacity_pages
                self.catalogue.written(move, error)
            case Drop():
                disk.pages.pop(move.key, None)
            case Clear():
                disk.pages.clear()

    def damage(self):
        """A bit flips in a page, or a page of a shared tier vanishes."""
        disk = self.random.choice(self.disks)
        if disk.pages:
            key = self.random.choice(list(disk.pages))
            if disk.shared:
                del disk.pages[key]
            else:
                disk.pages[key] = UNKNOWN

    # What must hold.

    def check(self):
        for load, allowed in self.allowed.items():
            got = self.outcomes.get(load)
            assert got is None or got in allowed, f"{load.key} gave {got}, not of {allowed}"

    def finish(self):
        while self.step():
            pass
        assert self.catalogue.idle()
        for load in self.allowed:
            assert load in self.outcomes or load in self.given_up, "a load was never answered"
        statistics = self.catalogue.statistics()
        for level, disk in zip(self.levels, self.disks, strict=True):
            assert disk.shared or set(level.copies) == set(disk.pages)
            assert all(copy.here for copy in level.copies.values())
        kept = statistics["host"].pages
        assert len(self.catalogue._free) + kept == len(self.frames), "a frame leaked"
        for key, page in self.catalogue._pages.items():
            assert not page.busy
            assert self.frames[page.frame] == self.named.get(key), "a frame holds another page"
