"""Send weights as deltas in verl 0.9.1, with a backend for verl's checkpoint engine.

Every worker of verl imports this module if the folder `plug_in` is on PYTHONPATH and you set
`checkpoint_engine.backend=primeblocks` and `checkpoint_engine.custom_backend_module=verl_weights`.
Trainer rank 0 sends the weights through shared memory, so all workers must be on one machine. For
several machines, pass another transport to `announce` and `find`.
"""

import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from primeblocks import weightsync

__all__ = ["PrimeblocksEngine"]

TIMEOUT_S = 60.0


# glue
@CheckpointEngineRegistry.register("primeblocks")
class PrimeblocksEngine(CheckpointEngine):
    def __init__(self, bucket_size, is_master=False, name="verl"):
        self.name, self.is_master, self.held, self.end = name, is_master, {}, None

    async def send_weights(self, weights, global_steps=0):
        for name, tensor in weights:  # verl gathers the weights on all ranks.
            if self.is_master:
                self.held.setdefault(name, torch.empty_like(tensor, device="cpu")).copy_(tensor)
        if self.is_master:
            if self.end is None:
                group = dist.new_group([0], backend="gloo", use_local_synchronization=True)
                plan, memory = weightsync.announce(self.name, self.held, group=group)
                self.end = weightsync.Publisher(plan, self.held, memory, group=group, full_every=16)
            return {"sync/bytes": self.end.publish(global_steps, timeout_s=TIMEOUT_S).bytes}

    def receive_weights(self, global_steps=0):
        if self.end is None:
            plan, memory = weightsync.find(self.name, timeout_s=TIMEOUT_S)
            self.end = weightsync.Subscriber(plan, self.load, memory)
        self.end.receive(global_steps, timeout_s=TIMEOUT_S)
        return iter(self.held.items())

    def load(self, tensors):
        self.held = {name: tensor.clone() for name, tensor in tensors}

    prepare = init_process_group = finalize = lambda self, **_: None
    build_topology = classmethod(lambda cls, *_: ({}, {}))


# end of glue
