"""Counts of the benchmark on few conversations; its oracle does not look at `Conversation`."""

import asyncio
from collections import Counter

import pytest

drift = pytest.importorskip("benchmarks.async_loop_parts.token_drift", reason="no tokenizer")


@pytest.mark.parametrize("realigned", [0, 16])
def test_what_is_recorded_was_sampled_and_what_is_tokenised_anew_was_not(realigned):
    tokens, found = drift.Tokens(), Counter()
    for seed in range(40):
        found += asyncio.run(drift.converse(tokens, seed, dropout=0.05, realigned=realigned))
    assert not found["not sampled"] + found["of another version"] + found["trained twice"]
    assert found["trained"] == found["sampled"] - found["dropped"] > 5000
    assert found["fork"] > 10
    assert found["anew, not sampled"] > 0.05 * found["anew"]
