"""Deployment shapes of vLLM engines as values that print command lines; nothing is started."""

from .deployment import Deployment, Process
from .features import FEATURES, REFUSED
from .models import MODELS, Model
from .shapes import colocated, prefill_decode, replicas, wide_ep, with_router

__all__ = [
    "FEATURES",
    "MODELS",
    "REFUSED",
    "Deployment",
    "Model",
    "Process",
    "colocated",
    "prefill_decode",
    "replicas",
    "wide_ep",
    "with_router",
]
