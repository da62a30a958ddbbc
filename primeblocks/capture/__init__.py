"""Conversations that become rollouts, and recording of agents, turn by turn and token by token.

Agents call a model over OpenAI's protocol. A session is one rollout under recording: a URL, a key
and a `Conversation`. A `Recorder` opens them in front of an engine of ids;
`adapters.uvicorn.CaptureServer` serves them.
"""

from .conversation import Continuity, Conversation
from .journal import CaptureJournal
from .recorder import CaptureBounds, CaptureSession, Recorder
from .seams import Generate, Renderer, Sampled

__all__ = [
    "CaptureBounds",
    "CaptureJournal",
    "CaptureSession",
    "Continuity",
    "Conversation",
    "Generate",
    "Recorder",
    "Renderer",
    "Sampled",
]
