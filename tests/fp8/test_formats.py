"""Scales, rounded once."""

import torch

from primeblocks.fp8.quantize import E4M3_MAX, scales_of


def test_scales_and_factors_are_quotients_that_were_rounded_once():
    """Against float64, whose 53 bits hold a quotient of two float32 well enough: 2 * 24 + 2."""
    generator = torch.Generator().manual_seed(0)
    amax = torch.rand(20_000, generator=generator) * 2.0 ** torch.randint(
        -60, 60, (20_000,), generator=generator
    )
    scales, factor = scales_of(amax, "float32", "amax")
    assert torch.equal(scales, (amax.double() / E4M3_MAX).float())
    assert torch.equal(factor, (torch.full_like(amax, E4M3_MAX).double() / amax.double()).float())
