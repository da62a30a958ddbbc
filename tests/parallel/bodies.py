"""What several files run on ranks, and on how many."""

import torch.distributed as dist

from primeblocks.parallel import plan_mesh


def each(body, cases):
    """Return what `body` returns for each case, all in one gang of ranks."""
    return [body(*case) for case in cases]


def meshes_of(**degrees):
    return plan_mesh(world_size=dist.get_world_size(), **degrees).build("cpu")


def in_turns(cases, world_size, full, step=2):
    """Return all cases for three ranks, and a part of them for other numbers, which take turns."""
    return cases if full or world_size == 3 else cases[world_size % step :: step]
