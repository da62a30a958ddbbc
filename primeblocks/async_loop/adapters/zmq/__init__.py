"""Transfer of groups from other processes and machines into a `RolloutBuffer`, over ZeroMQ.

The ordinal of a group identifies the group. The receiver stores a state per ordinal:

    ARRIVED    decoded, waits for room in the buffer
    ACCEPTED   in the buffer, or taken from it; `put` returns
    SETTLED    its training step is durable (`settle`); the sender deletes its copy

The sender keeps a copy of a group until the group is SETTLED. Every `retry_s` seconds, the sender
sends a list of the ordinals of all groups that it keeps, and the receiver answers with their
states. Each such exchange makes up for messages that were lost earlier, also in a reconnection or a
restart. The sender sends a group again if the receiver has read the group's message or a later
message, but has no state for the group. If the newest list of a sender lacks an ordinal, the
receiver deletes the ordinal's state, unless the group is ACCEPTED.

If a sender dies, the receiver keeps the states of the sender's groups.

If only a sender or only the receiver dies, no accepted group is lost. The accepted groups of a dead
sender have entered the buffer. If the receiver dies, every sender sends its unsettled groups again.
An accepted group is lost only if its sender and the receiver both die before the group is settled.

Messages are JSON and `codec` payloads. The sender and the receiver do not use pickle. Any process
that reaches the port can add groups. Bind to a private address, or set ZeroMQ's CURVE keys in a
function that you pass as `configure=`.
"""

from .receiver import RolloutReceiver
from .sender import RolloutSender

__all__ = ["RolloutReceiver", "RolloutSender"]
