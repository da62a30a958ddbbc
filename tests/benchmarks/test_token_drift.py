"""Counts of the benchmark on few conversations; its oracle does not look at `Conversation`."""

import asyncio
from collections import Counter
from functools import cache

import pytest

drift = pytest.importorskip("benchmarks.async_loop_parts.token_drift", reason="no tokenizer")


@cache
def _tokens():
    return drift.Tokens()


@pytest.mark.parametrize("realigned", [0, 16])
def test_what_is_recorded_was_sampled_and_what_is_tokenised_anew_was_not(realigned):
    tokens, found = _tokens(), Counter()
    for seed in range(20):
        found += asyncio.run(drift.converse(tokens, seed, dropout=0.05, realigned=realigned))
    assert not found["not sampled"] + found["of another version"] + found["trained twice"]
    assert found["trained"] == found["sampled"] - found["dropped"] > 2500
    assert found["fork"] > 5
    assert found["anew, not sampled"] > 0.05 * found["anew"]
