"""The benchmark of buffers: agreement that finds a difference, and figures of the fastest peer."""

import pytest

from benchmarks.async_loop_parts import buffer
from benchmarks.async_loop_parts.rollouts import Shape, digests, make_groups

SMALL = Shape(groups=2, samples=2, tokens=8, route_bytes=4)


def test_rollouts_agree_only_if_each_came_once_with_its_own_bytes():
    def of(groups):
        return [
            (group.ordinal, i, [rollout.tokens, rollout.attachments["routes"]])
            for group in groups
            for i, rollout in enumerate(group.rollouts)
        ]

    sent = of(make_groups(SMALL, range(2)))
    assert digests(sent) == digests(reversed(of(make_groups(SMALL, [1, 0]))))
    assert len({*digests(sent).values()}) == 4
    ordinal, sample, (tokens, routes) = sent[3]
    assert digests([*sent[:3], (ordinal, sample, [tokens, bytes(len(routes))])]) != digests(sent)
    with pytest.raises(AssertionError, match="came twice"):
        digests([*sent, sent[0]])


def test_the_peer_stands_with_the_units_that_make_it_fastest():
    def job(ours, theirs):
        seconds = {"whole": ours, "their_whole": theirs, "stream": ours, "their_stream": theirs}
        return {"bytes": 10**6, "seconds": seconds}

    by_units = {1: job([1.0, 1, 1], [8.0, 9, 10]), 2: job([2.0, 2, 3], [5.0, 6, 7])}
    figures = buffer._figures("at", by_units, 1e6)
    assert figures["at.whole.speedup_vs_transferqueue"] == (3.0, "ratio", buffer.PEER)
    assert figures["at.stream.their_units"][0] == 2
    assert figures["at.whole.spread"][0] == 0.5
    assert figures["at.over_copy_bandwidth"][0] == 2.0


def test_without_the_peer_there_are_no_figures_of_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(buffer, "PYTHON", tmp_path / ".venv-transferqueue" / "bin" / "python")
    monkeypatch.setattr(buffer, "in_process", lambda: {"ours": (1.0, "us", "")})
    assert buffer.figures() == {"ours": (1.0, "us", "")}
    assert "there is no .venv-transferqueue" in capsys.readouterr().out
