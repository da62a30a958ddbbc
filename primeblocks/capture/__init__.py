"""Recording of agents' conversations, token by token, and rollouts made of conversations.

Agents call a model over OpenAI's protocol. A session records one conversation, and has a URL, a key
and a `Conversation`. A `Recorder` opens sessions, which forward requests to an engine that works on
token ids. `adapters.uvicorn.CaptureServer` serves sessions over HTTP.
"""

from .conversation import Continuity, Conversation
from .history import Renderer
from .recorder import CaptureBounds, CaptureSession, Generate, Recorder, Sampled

__all__ = [
    "CaptureBounds",
    "CaptureSession",
    "Continuity",
    "Conversation",
    "Generate",
    "Recorder",
    "Renderer",
    "Sampled",
]
