"""Micro-batches of packed rollouts, balanced over ranks by tokens and by cost.

With trees, a position that several rollouts share is computed only once.
"""

from .pack import Pack, pack, unpack
from .plan import PackingPlan, plan_packing, sequence_flops
from .tree_packing import plan_tree_packing
from .trees import TreePlan, plan_trees

__all__ = [
    "Pack",
    "PackingPlan",
    "TreePlan",
    "pack",
    "plan_packing",
    "plan_tree_packing",
    "plan_trees",
    "sequence_flops",
    "unpack",
]
