"""What several files run on ranks, and on how many."""

import torch
import torch.distributed as dist

from primeblocks.parallel import plan_mesh


def each(body, cases):
    """Return what `body` returns for each case, all in one gang of ranks."""
    return [body(*case) for case in cases]


def meshes_of(**degrees):
    return plan_mesh(world_size=dist.get_world_size(), **degrees).build("cpu")


def in_turns(cases, world_size, full, step=4):
    """Return all cases for three ranks, and some of them for other numbers, which take turns."""
    return cases if full or world_size == 3 else cases[world_size % step :: step]


@torch.no_grad()
def randomize(parameters, *, seed=0):
    """Set parameters far from the symmetry of a fresh model."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(noise * parameter.shape[-1] ** -0.5 + (parameter.ndim == 1))
