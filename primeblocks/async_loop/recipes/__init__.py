"""Deployment shapes of vLLM engines as values that print command lines; nothing is started."""

from .features import FEATURES, REFUSED
from .models import MODELS, Model
from .recipe import Process, Recipe
from .shapes import colocated, prefill_decode, replicas, wide_ep, with_router

__all__ = [
    "FEATURES",
    "MODELS",
    "REFUSED",
    "Model",
    "Process",
    "Recipe",
    "colocated",
    "prefill_decode",
    "replicas",
    "wide_ep",
    "with_router",
]
