"""Trainer and engine take turns: bytes as measured, and what is left after a failure.

The trainer's memory is real (`parallel.memory.HostMemory`). The engine is a fake of ours that
allocates, loads and frees real memory; vLLM's sleep does nothing on a CPU, and was not run.
"""

from itertools import pairwise
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from primeblocks.errors import CapacityError, DeadlineError, EngineError, UsageError
from primeblocks.testing import ranks
from primeblocks.testing.oracles import assert_same_bits
from primeblocks.weightsync.engines import colocated
from primeblocks.weightsync.engines.colocated import ColocatedEngine
from tests.weightsync.colocated_site import (
    MIB,
    TIMEOUT_S,
    TO_ENGINE,
    TO_TRAINER,
    Site,
    assert_same_state,
    assert_serves,
)


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path)
    yield site
    site.close()


def _anonymous_bytes():
    """Resident memory of this process that is no file's, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_the_engine_serves_what_was_published_and_training_goes_on(site):
    twin = nn.Linear(4, 4, bias=False)
    twin.load_state_dict(site.model.state_dict())
    for version in range(1, 4):
        weights = site.model.weight.detach().clone()
        turn = site.colocated.to_engine(version, timeout_s=TIMEOUT_S)
        assert turn.version == version
        assert_serves(site, weights)
        with pytest.raises(UsageError, match="which HostMemory stores"):
            site.step()
        site.colocated.to_trainer(timeout_s=TIMEOUT_S)
        assert site.engine.weights == {}
        assert_same_bits(site.model.weight.detach(), weights)
        site.step()


def _stages(tmp_path):
    # Above 32 MiB the allocator gives each tensor pages of its own, and back when it is freed.
    shape, cache = (5120, 4096), 80 * MIB
    site = Site(tmp_path, shape=shape, cache_bytes=cache, chunk_bytes=64 * MIB)
    weights = 4 * prod(shape)
    trainer, engine = 4 * weights, weights // 2
    # What it keeps of smaller ones is its own affair. The smallest part that moves is the engine's.
    noise = engine // 2
    with site.host.released():
        pass  # The copies on the host are allocated here, once.
    site.memory = _anonymous_bytes
    for version in (1, 2):
        there = site.colocated.to_engine(version, timeout_s=TIMEOUT_S)
        back = site.colocated.to_trainer(timeout_s=TIMEOUT_S)
        if version == 1:
            continue  # The first turn also imports modules.
        sizes = [there.bytes_before, *(stage.bytes for stage in there.stages)]
        sizes += [back.bytes_before, *(stage.bytes for stage in back.stages)]
        changes = [after - before for before, after in pairwise(sizes)]
        expected = [0, -trainer, engine, 0, cache, 0, -engine - cache, trainer]
        for change, want in zip(changes, expected, strict=True):
            assert abs(change - want) < noise, (changes, expected)
        base = there.bytes_before - trainer
        assert max(sizes) - base < max(trainer, engine + cache) + noise
    site.close()


def test_the_bytes_of_each_stage_as_the_kernel_counts_them(tmp_path):
    # In a process of its own: what other tests freed could be used again, and nothing would change.
    ranks.run(_stages, tmp_path, world_size=1)


@pytest.mark.parametrize("fails", TO_ENGINE + TO_TRAINER)
def test_a_stage_that_fails_gives_the_turn_back(site, fails):
    error = RuntimeError("CUDA")
    site.colocated.to_engine(1, timeout_s=TIMEOUT_S)
    take = lambda: site.colocated.to_trainer(timeout_s=TIMEOUT_S)  # noqa: E731
    if fails in TO_ENGINE:
        take()
        site.step()
        take = lambda: site.colocated.to_engine(2, timeout_s=TIMEOUT_S)  # noqa: E731
    before, site.faults[fails] = site.state(), error
    with pytest.raises(type(error), match=str(error)):
        take()
    assert not site.faults
    assert_same_state(site.state(), before)
    take()
    if fails in TO_ENGINE:
        assert_serves(site, before["trainer"][0])
    else:
        assert site.colocated.turn == "trainer"
        site.step()


@pytest.mark.parametrize("half", ["sleep", "wake"])
def test_an_engine_that_stops_halfway_goes_back(site, half):
    calls = {name: getattr(site.engine, name) for name in ("sleep", "wake")}
    take = site.colocated.to_trainer
    if half == "sleep":
        site.colocated.to_engine(1, timeout_s=TIMEOUT_S)
    else:
        take = lambda **how: site.colocated.to_engine(1, **how)  # noqa: E731
    before, whole = site.state(), calls[half]

    def stops(*args):
        whole(*args)
        raise CapacityError("halfway")

    update = site.colocated._engine.update
    site.colocated._engine = ColocatedEngine(**calls | {half: stops}, update=update)
    with pytest.raises(CapacityError, match="halfway"):
        take(timeout_s=TIMEOUT_S)
    assert_same_state(site.state(), before)


def test_the_order_of_stages(site):
    there = site.colocated.to_engine(1, timeout_s=TIMEOUT_S)
    back = site.colocated.to_trainer(timeout_s=TIMEOUT_S)
    assert site.calls == TO_ENGINE + TO_TRAINER
    names = ["publish", "trainer away", "wake weights", "update", "wake cache"]
    assert [stage.name for stage in there.stages] == names
    assert [stage.name for stage in back.stages] == ["engine asleep", "trainer back"]
    rows = there.table().splitlines()
    assert rows[0].split() == ["stage", "seconds", "bytes", "in", "use", "change"]
    assert rows[1].split() == ["before", "0"]
    assert [row.split()[-1] for row in rows[2:]] == ["+0"] * 5


def test_the_engine_leaves_before_the_trainer_comes_back(site):
    site.faults["wake kv_cache"] = CapacityError("full")
    with pytest.raises(CapacityError):
        site.colocated.to_engine(1, timeout_s=TIMEOUT_S)
    assert site.calls == [*TO_ENGINE, "sleep", "restore"]


def test_a_failure_on_the_way_back_tears(site):
    site.faults |= {"update": CapacityError("full"), "restore": CapacityError("fuller")}
    with pytest.raises(EngineError, match=r"Capacity.*: full. Going .* too: Capacity.*: fuller."):
        site.colocated.to_engine(1, timeout_s=TIMEOUT_S)
    assert site.colocated.turn == "torn"
    for call in (site.colocated.to_trainer, lambda **kw: site.colocated.to_engine(2, **kw)):
        with pytest.raises(UsageError, match="the turn is 'torn'"):
            call(timeout_s=TIMEOUT_S)


def test_turns_are_not_taken_twice(site):
    with pytest.raises(UsageError, match="not the engine's turn: the turn is 'trainer'"):
        site.colocated.to_trainer(timeout_s=TIMEOUT_S)
    site.colocated.to_engine(1, timeout_s=TIMEOUT_S)
    with pytest.raises(UsageError, match="not the trainer's turn"):
        site.colocated.to_engine(2, timeout_s=TIMEOUT_S)


def test_no_stage_begins_after_half_the_time(site, monkeypatch):
    before, clock = site.state(), SimpleNamespace(now=0.0)
    monkeypatch.setattr(colocated, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def update(receipt, timeout_s):
        clock.now += timeout_s

    site.colocated._engine = ColocatedEngine(
        sleep=site.engine.sleep, wake=site.engine.wake, update=update
    )
    with pytest.raises(DeadlineError, match=r"'wake cache' was not begun: half of 4 s .*update"):
        site.colocated.to_engine(1, timeout_s=4)
    assert_same_state(site.state(), before)


def test_stages_hear_how_long_they_have(site):
    heard = []
    site.colocated._engine = ColocatedEngine(
        sleep=heard.append,
        wake=lambda part, s: heard.append(s),
        update=lambda receipt, s: heard.append(s),
    )
    site.colocated.to_engine(1, timeout_s=TIMEOUT_S)
    assert sorted(heard, reverse=True) == heard
    assert 0 < heard[-1] < heard[0] <= TIMEOUT_S / 2


def test_an_interrupted_turn_is_given_back(site):
    before, site.faults["update"] = site.state(), KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        site.colocated.to_engine(1, timeout_s=TIMEOUT_S)
    assert_same_state(site.state(), before)
