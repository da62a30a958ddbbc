"""Bodies of ranks that several files share."""

import torch.distributed as dist

from primeblocks.parallel import plan_mesh


def each(body, cases):
    """Return what `body` returns for each case, all in one gang of ranks."""
    return [body(*case) for case in cases]


def meshes_of(**degrees):
    return plan_mesh(world_size=dist.get_world_size(), **degrees).build("cpu")
