"""Conversations that become rollouts, and a recorder of agents, token by token.

Agents call a model over OpenAI's protocol. A session is one conversation that is being recorded. It
has a URL, a key and a `Conversation`. A `Recorder` opens sessions in front of an engine that takes
ids, and `adapters.uvicorn.CaptureServer` serves them over HTTP.
"""

from .conversation import Continuity, Conversation
from .history import Renderer
from .journal import CaptureJournal
from .recorder import CaptureBounds, CaptureSession, Generate, Recorder, Sampled

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
