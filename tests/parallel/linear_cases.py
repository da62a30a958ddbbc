"""Operands of convolutions and recurrences over a split sequence, ours and the loops."""

import torch

from primeblocks.parallel import reference
from primeblocks.parallel.linear import causal_conv1d, gated_delta_rule, state_space

# Fewer heads than ranks, or heads that ranks do not divide.
DELTA_HEADS, SPACE_HEADS, GROUPS, KEY, VALUE, TAPS = 3, 6, 2, 3, 5, 4


def _conv_inputs(tokens, generator):
    shapes = [(tokens, 6), (6, TAPS), (6,)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def delta_inputs(tokens, generator):
    shapes = [(DELTA_HEADS, *dim) for dim in ((KEY,), (KEY,), (VALUE,), (), ())]
    q, k, v, g, beta = (
        torch.randn(tokens, *s, generator=generator, dtype=torch.float64) for s in shapes
    )
    return [q, k / (k.norm(dim=-1, keepdim=True) + 1e-6), v, -g.exp() / 4, beta.sigmoid()]


def space_inputs(tokens, generator):
    by_token = [(SPACE_HEADS, VALUE), (SPACE_HEADS,), (GROUPS, KEY), (GROUPS, KEY)]
    shapes = [*((tokens, *s) for s in by_token), (SPACE_HEADS,), (SPACE_HEADS,)]
    x, dt, B, C, A, D = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return [x, dt.exp() / 4, B, C, -A.exp(), D]


def _space(x, dt, B, C, A, D, **where):
    return state_space(x, dt, A, B, C, D, **where)


def _space_loops(x, dt, B, C, A, D, lengths):
    return reference.state_space(x, dt, A, B, C, D, lengths)


# Inputs, of which so many lead with tokens; ours; the loops.
CASES = {
    "conv": (_conv_inputs, 1, causal_conv1d, reference.causal_conv1d),
    "delta": (delta_inputs, 5, gated_delta_rule, reference.gated_delta_rule),
    "space": (space_inputs, 4, _space, _space_loops),
}


def drawn(name, tokens):
    draw, by_token, *_ = CASES[name]
    return draw(tokens, torch.Generator().manual_seed(tokens)), by_token
