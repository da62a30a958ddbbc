"""Micro-batches of packed rollouts, balanced over ranks by tokens and by cost."""

from .pack import Pack, pack, unpack
from .plan import PackingPlan, plan_packing, sequence_flops

__all__ = ["Pack", "PackingPlan", "pack", "plan_packing", "sequence_flops", "unpack"]
