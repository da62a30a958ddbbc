"""Trajectories by number, and what a ledger gave back as plain values that compare."""

import dataclasses
import random
from collections.abc import Mapping

import numpy as np

from primeblocks.async_loop.ledger import Partial
from primeblocks.rollout import Group, Rollout

PROMPTS = [
    "Sag, wie viel ist zwei plus zwei? ∑ 数 \ud800 \0",
    {"text": "a", "ids": [1, 2**70, -3], "nested": [{"x": None}, [True, 0.1, -0.0]]},
    [],
    None,
    (1, b"a", float("inf")),
]


def make_arrays(seed, length):
    chance = random.Random(seed)
    return {
        "tokens": np.array([chance.randrange(1 << 40) for _ in range(2 + length)]),
        "prompt_length": 2,
        "logprobs": np.array([-chance.random() for _ in range(length)]),
        "versions": np.array([chance.randrange(9) for _ in range(length)], dtype=np.int64),
        "loss_mask": np.array([chance.random() < 0.5 for _ in range(length)], dtype=bool),
    }


def make_partial(seed):
    """A trajectory so far; every other one has nothing in it yet."""
    return Partial(**make_arrays(seed, (seed % 2) * (1 + seed % 7)))


def make_rollout(seed):
    return Rollout(
        **make_arrays(seed, 1 + seed % 5),
        finish_reason="stop",
        prompt_id=("set", seed) if seed % 2 else None,
        reward=seed / 8,
        attachments={"routes": np.full((3, 2), seed % 251, np.uint8)} if seed % 3 else {},
    )


def make_group(prompt, seed):
    rollouts = tuple(make_rollout(seed + i) for i in range(1 + seed % 3))
    return Group(prompt, rollouts, seed % 4, generate_s=seed / 3)


def plain(value):
    """Make a value of types, texts and bytes: two are equal where nothing at all differs."""
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if dataclasses.is_dataclass(value):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return (type(value).__name__, plain(fields))
    if isinstance(value, Mapping):
        return ("dict", [(key, plain(each)) for key, each in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [plain(each) for each in value])
    return (type(value).__name__, repr(value))


def connection_of(journal):
    return journal._database._connection


def some_calls():
    """A short run: each call of the protocol, in an order that makes sense."""
    yield "restore", 0
    for ordinal in range(8):
        yield "drawn", ordinal, {"text": f"prompt {ordinal}"}
        yield "started", ordinal, 0
        yield "sampled", ordinal, 1, make_partial(2 * ordinal + 1)
        if ordinal < 6:
            yield "finished", ordinal, make_group({"text": f"prompt {ordinal}"}, ordinal)
    yield "left_out", 5, "filtered"
    yield "taken", [0, 1], 0
    yield "trained", 0
    yield "taken", [3], 1
    yield "dropped", 2
    yield "checkpointed", 1
    yield "trained", 1


def fill(ledger, *, calls=None):
    for call, *args in [*some_calls()][:calls]:
        getattr(ledger, call)(*args)
