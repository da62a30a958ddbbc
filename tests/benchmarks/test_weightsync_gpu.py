"""The GPU's benchmarks of weightsync: at small sizes on a CPU, gates that refuse."""

import pytest

from benchmarks.harness import collect
from benchmarks.weightsync_parts import gpu_colocated, gpu_deltas


def test_every_step_of_a_delta_is_measured():
    found = collect(gpu_deltas.figures("cpu", gpu_deltas.SMALL))
    for step in ("digest", "pack_to_host", "pack_on_device"):
        assert f"weightsync.{step}.gpu.pcie_fraction" in found
    for step in ("encode", "apply"):
        assert f"weightsync.delta.gpu.{step}.copy_bandwidth_fraction" in found
    assert found["weightsync.delta.gpu.bytes_ratio"][0] < 0.2
    for kind in ("full", "delta"):
        for step in ("publish", "receive"):
            assert f"weightsync.shared_memory.gpu.{kind}.{step}_ms" in found


@pytest.mark.parametrize("step", ["bucket_digest", "cast_and_digest", "apply_delta"])
def test_no_step_of_a_delta_is_timed_that_differs_from_the_hosts(monkeypatch, step):
    monkeypatch.setattr(gpu_deltas, step, lambda *_: None)
    with pytest.raises(AssertionError):
        collect(gpu_deltas.figures("cpu", gpu_deltas.SMALL))


def test_every_stage_of_a_turn_is_measured(capsys):
    found = collect(gpu_colocated.figures("cpu", gpu_colocated.SMALL))
    table = capsys.readouterr().out
    stages = ("publish", "trainer away", "wake weights", "update", "wake cache", "engine asleep")
    for stage in (*stages, "trainer back"):
        assert stage in table
        assert found[f"weightsync.colocated.gpu.{stage.replace(' ', '_')}_ms"][0] > 0


def test_a_turn_after_which_bytes_are_left_is_refused(monkeypatch):
    monkeypatch.setattr(gpu_colocated.Engine, "_sleep", lambda *_: None)
    with pytest.raises(AssertionError, match="engine asleep: \\+0 bytes, not -5,120"):
        collect(gpu_colocated.figures("cpu", gpu_colocated.SMALL))


def test_an_engine_that_serves_other_weights_is_refused(monkeypatch):
    monkeypatch.setattr(gpu_colocated.Engine, "_load", lambda _, named: [*named])
    with pytest.raises(AssertionError, match="serves other weights than 1"):
        collect(gpu_colocated.figures("cpu", gpu_colocated.SMALL))
