"""Digests that a second thread helps with."""

from concurrent.futures import Executor, Future

import torch

from primeblocks.testing import oracles
from primeblocks.weightsync.digest import bucket_digest, cast_and_digest


class LastMoment(Executor):
    """An executor that works when its work is waited for, and not before."""

    def submit(self, work, *args):
        future = Future()
        future.result = lambda: work(*args)
        return future


def test_the_digest_covers_what_the_helper_has_not_yet_done():
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(100, generator=generator) for _ in range(5)]
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.float32]
    into = [torch.empty(100, dtype=dtype) for dtype in dtypes]
    digest = cast_and_digest(sources, dtypes, into, helper=LastMoment())
    for source, made in zip(sources, into, strict=True):
        oracles.assert_same_bits(made, source.to(made.dtype))
    assert digest == bucket_digest(into)
