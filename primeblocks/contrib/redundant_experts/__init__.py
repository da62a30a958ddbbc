"""Copies of hot experts, so that no rank of an expert group has much more work than the others."""

from .placement import Placement, plan_placement

__all__ = ["Placement", "plan_placement"]
