"""The store's decisions, under random orders of everything that threads do."""

import random

import pytest

from primeblocks.kvoffload import PageKey
from primeblocks.kvoffload.evict import RolloutAware, VersionAware, lru
from tests.kvoffload.store.schedules import Disk, Simulation

SCHEDULES = 600
PAGES = [(number, version) for number in range(6) for version in range(8)]


def key_of(number, version):
    return PageKey("salt", bytes([number]), version=version)


def drive(simulation, chance, *, calls, content_addressed):
    """Calls and steps of threads, mixed at random."""
    version = 0
    for _ in range(calls):
        for _ in range(chance.randrange(4)):
            simulation.step()
        keys = [key_of(chance.randrange(6), max(0, version - chance.randrange(3)))]
        users = chance.choice([(), ("one",), ("two",)])
        match chance.randrange(16):
            case 0 | 1 | 2 | 3 | 4 if content_addressed:
                simulation.save_value(keys[0], hash(keys[0]), users=users)
            case 0 | 1 | 2 | 3 | 4:
                keys += [key_of(chance.randrange(6), version) for _ in range(chance.randrange(3))]
                requests = simulation.save(keys, users=users)
                simulation.given_up |= {each for each in requests if chance.random() < 0.05}
            case 5 | 6 | 7 | 8 | 9:
                load = simulation.load(keys[0], users=users)
                if chance.random() < 0.05 and load not in simulation.outcomes:
                    simulation.given_up.add(load)
            case 10:
                version += 1
                simulation.catalogue.version = version
            case 11:
                tell(simulation.catalogue, chance)
            case 12:
                simulation.damage()
            case 13 if not content_addressed and chance.random() < 0.3:
                simulation.clear()
            case 14:
                simulation.flush()
            case 15 if simulation.disks:
                chance.choice([simulation.hang, simulation.fill, simulation.rest])()


def tell(catalogue, chance):
    name = chance.choice(["one", "two"])
    match chance.randrange(4):
        case 0:
            catalogue.end(name)
        case 1:
            catalogue.note(lambda ledger: ledger.pause(name, "tool"))
        case 2:
            catalogue.note(lambda ledger: ledger.resume(name))
        case 3:
            catalogue.note(lambda ledger: ledger.queue([name]))


@pytest.mark.parametrize(
    "evict", [lru, VersionAware(1), RolloutAware(1)], ids=["lru", "version aware", "rollout aware"]
)
@pytest.mark.parametrize("through", [False, True], ids=["back", "through"])
def test_no_schedule_gives_a_wrong_page(evict, through, full):
    flushed = 0
    for seed in range(10_000 // 6 if full else SCHEDULES // 6):
        chance = random.Random(seed)
        disks = [Disk(chance.randrange(1, 8)) for _ in range(chance.randrange(3))]
        simulation = Simulation(
            chance, frames=chance.randrange(1, 5), disks=disks, evict=evict, through=through
        )
        if not disks:
            simulation.damage = lambda: None
        drive(simulation, chance, calls=40, content_addressed=False)
        simulation.finish()
        flushed += len(simulation.flushes)
    assert flushed


def test_stores_that_share_a_tier_give_each_other_right_pages(full):
    for seed in range(2000 if full else SCHEDULES // 6):
        chance = random.Random(seed)
        common = Disk(0, shared=True)
        stores = [
            Simulation(
                chance, frames=2, disks=[Disk(3), common], evict=lru, through=chance.random() < 0.5
            )
            for _ in range(2)
        ]
        for store in stores:
            store.named = {key: hash(key) for key in map(key_of, *zip(*PAGES, strict=True))}
        for _ in range(10):
            drive(chance.choice(stores), chance, calls=4, content_addressed=True)
        for store in stores:
            store.finish()
