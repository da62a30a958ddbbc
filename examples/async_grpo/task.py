"""The task: write a few words of Python's own documentation backwards, letter by letter."""

import random
import re

INSTRUCTION = "write the words that follow backwards, letter by letter: "
SNIPPET = (8, 12)  # characters, at least and at most
HELD_OUT = 128

PAD, BOS, EOS = 0, 1, 2
LETTERS = " ,:abcdefghijklmnopqrstuvwxyz>"
IDS = {letter: 3 + i for i, letter in enumerate(LETTERS)}


def snippets(seed: int) -> tuple[list[str], list[str]]:
    """Return training texts and held-out texts: short texts from Python's documentation."""
    from pydoc_data.topics import topics

    words = re.findall(r"[a-z]+", " ".join(topics[name] for name in sorted(topics)).lower())
    low, high = SNIPPET
    found = set()
    for start in range(len(words)):
        text = words[start]
        for word in words[start + 1 : start + 5]:
            if len(text) >= low:
                break
            text += " " + word
        if low <= len(text) <= high:
            found.add(text)
    shuffled = random.Random(seed).sample(sorted(found), len(found))
    return shuffled[HELD_OUT:], shuffled[:HELD_OUT]


def encode(text: str) -> list[int]:
    return [IDS[letter] for letter in text]


def prompt_of(text: str) -> list[int]:
    return [BOS, *encode(INSTRUCTION + text + ">")]


def answer_of(text: str) -> list[int]:
    return [*encode(text), EOS]


def reward_of(text: str, completion: list[int]) -> float:
    """Return the share of positions with the right letter. The end token counts as a letter."""
    target = answer_of(text[::-1])
    right = sum(a == b for a, b in zip(target, completion, strict=False))
    return right / max(len(target), len(completion))
