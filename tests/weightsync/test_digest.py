"""Copies and digests of tensors that lie in memory in every way."""

import torch

from primeblocks.testing import oracles
from primeblocks.weightsync import digest as digests
from primeblocks.weightsync.digest import bucket_digest, cast_and_digest


def test_copies_are_cast_and_digested_however_they_lie(monkeypatch):
    monkeypatch.setattr(digests, "_CHUNK_BYTES", 56)
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(10, 14, generator=generator) for _ in range(6)]
    sources = [wide[0], wide[1].t(), wide[2][:, 3:9], wide[3][0, 0], wide[4], wide[5][:0]]
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    dtypes.append(torch.float32)
    into = [torch.empty(s.shape, dtype=dtype) for s, dtype in zip(sources, dtypes, strict=True)]
    into[4] = torch.empty(14, 10, dtype=torch.bfloat16).t()
    digest = cast_and_digest(sources, dtypes, into)
    for source, made in zip(sources, into, strict=True):
        oracles.assert_same_bits(made, source.to(made.dtype))
    assert digest == bucket_digest(into) == cast_and_digest(sources, dtypes, None)
