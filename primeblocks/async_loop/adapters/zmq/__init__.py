"""Groups from other processes and machines into a `RolloutBuffer`, over ZeroMQ.

A group is identified by its ordinal. The receiver has a state for each ordinal that it knows:

    ARRIVED    decoded, waits for room in the buffer
    ACCEPTED   in the buffer, or taken from it; `put` returns
    SETTLED    its training step is durable (`settle`); the sender deletes its copy

The sender keeps a group until the group is SETTLED, and names all groups that it keeps once per
`retry_s`. The receiver answers with the states of these groups, so the next exchange repairs every
lost message, reconnection and restart. The sender sends a group again if the receiver has read
the group's message or a later message, but does not know the group. The receiver forgets an ordinal
that its sender does not name any more, unless the group is ACCEPTED.

If a sender dies, the receiver keeps the ordinals of the groups that the sender named last.

One death therefore loses no accepted group. If a sender dies, its accepted groups are in the
buffer. If the receiver dies, every sender sends again its groups that are not settled. An accepted
group is lost only if its sender and the receiver both die before the group is settled.

Messages are JSON and `codec` payloads. Nothing is unpickled. Any process that reaches the port can
add groups. Bind to a private address, or pass `configure=` a function that sets ZeroMQ's CURVE
keys.
"""

from .receiver import RolloutReceiver
from .sender import RolloutSender

__all__ = ["RolloutReceiver", "RolloutSender"]
