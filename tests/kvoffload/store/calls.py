"""Small pages by number, saved and loaded with a deadline."""

import numpy as np

from primeblocks.kvoffload import PageKey
from tests.kvoffload.conftest import PAGE
from tests.kvoffload.memory_tier import SOON


def key_of(number):
    return PageKey("s", bytes([number]))


def page_of(number):
    return np.full(PAGE, number, dtype=np.uint8)


def save(store, number):
    return store.save(key_of(number), page_of(number)).wait(timeout_s=SOON)


def load(store, number):
    """The tier that had the page, or None."""
    into = np.zeros(PAGE, np.uint8)
    return store.load(key_of(number), into=into).wait(timeout_s=SOON).tier
