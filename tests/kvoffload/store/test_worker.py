"""The order in which a tier's thread does what it is given."""

from primeblocks.kvoffload.moves import (
    Ask,
    Clear,
    Drop,
    HostPage,
    LoadRequest,
    LowerCopy,
    PageRead,
    Write,
)
from primeblocks.kvoffload.worker import Holds, TierWorker, Until
from tests.kvoffload.conftest import EXTRA, PAGE
from tests.kvoffload.memory_tier import SOON
from tests.kvoffload.store.calls import key_of


def page(number):
    return HostPage(key_of(number), frame=number, length=PAGE + EXTRA)


def write(number):
    return Write(0, page(number), LowerCopy(here=False))


def test_reads_come_first_and_changes_in_order_in_batches(host, memory):
    below, slab, calls = memory(8), host(8), []

    def noted(name, number_of=lambda keys: [key.hash[0] for key in keys]):
        do = getattr(below, name)

        def call(*arguments, **named):
            calls.append((name, *map(number_of, arguments)))
            return do(*arguments, **named)

        setattr(below, name, call)

    for name in ("get", "drop", "clear", "holds", "flush"):
        noted(name)
    noted("put", lambda records: [record.key.hash[0] for record in records])
    worker = TierWorker(below, slab, report=lambda outcomes: None)
    with worker._order.changed:  # the thread sees all of them at once
        for move in (
            write(0),
            write(1),
            Drop(0, key_of(0)),
            write(2),
            PageRead(0, page(5), LowerCopy(here=True)),
            Ask(0, LoadRequest(key_of(6))),
            Holds([key_of(7)], lambda held: None),
            Clear(0),
            write(3),
            Until(lambda error: None, flush=True),
            Until(lambda error: None),
        ):
            worker.give(move)
    worker.stop().join(SOON)
    assert calls == [
        ("get", [5]),
        ("holds", [6]),
        ("holds", [7]),
        ("put", [0, 1]),
        ("drop", [0]),
        ("put", [2]),
        ("clear",),
        ("put", [3]),
        ("flush",),
    ]
    assert below.closed
