"""The harness refuses to time what disagrees, and writes what it measured."""

import json
import sys

import pytest

from benchmarks import harness


def test_nothing_is_timed_without_agreement():
    called = []

    def disagree():
        raise AssertionError("not the same")

    with pytest.raises(AssertionError, match="not the same"):
        harness.compare(lambda: called.append(1), agree=disagree)
    assert called == []


def test_candidates_take_turns():
    order = []
    timings = harness.compare(
        lambda: order.append("a"), lambda: order.append("b"), agree=lambda: None, runs=3
    )
    assert "".join(order) == "ab" + "ababab"
    assert [len(timing.seconds) for timing in timings] == [3, 3]
    assert all(timing.median > 0 and timing.spread >= 0 for timing in timings)


def test_a_copy_moves_bytes():
    assert harness.copy_bandwidth(size_bytes=1 << 20) > 1e6


def test_figures_are_written_with_machine_and_commit(tmp_path, monkeypatch, capsys):
    file = tmp_path / "x.json"
    monkeypatch.setattr(sys, "argv", ["x", "--json", str(file)])
    harness.main(lambda: {"a.b.ratio": (1.5, "ratio", "peer")})
    (figure,) = json.loads(file.read_text())
    assert figure.keys() == {"figure", "value", "unit", "peer", "machine", "commit"}
    assert (figure["figure"], figure["value"], figure["peer"]) == ("a.b.ratio", 1.5, "peer")
    assert "torch" in figure["machine"]
    assert "a.b.ratio" in capsys.readouterr().out
