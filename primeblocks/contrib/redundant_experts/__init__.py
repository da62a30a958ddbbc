"""Copies of hot experts, so that the ranks of an expert group have similar work."""

from .placement import Placement, plan_placement

__all__ = ["Placement", "plan_placement"]
