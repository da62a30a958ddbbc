"""Transfers of `TrlTransfer` that fail, without TRL. Its trainer runs in tests/async_loop."""

import asyncio

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import TransferError
from primeblocks.testing import ranks
from primeblocks.testing.faults import FaultyTransport
from primeblocks.weightsync import SharedMemoryTransport, Subscriber
from primeblocks.weightsync.adapters.trl import TrlTransfer
from tests.deadlines import HANG_S as TIMEOUT_S


def test_a_transfer_that_failed_is_sent_again(tmp_path):
    """A failed publish leaves its version number free. A failed update has used the number."""
    engine, failures = {}, [RuntimeError("busy"), None, None]

    async def attach(plan):
        load = lambda tensors: engine.update((n, t.clone()) for n, t in tensors)  # noqa: E731
        engine_end = SharedMemoryTransport("policy", root=str(tmp_path))
        engine["subscriber"] = Subscriber(plan, load, engine_end)

    async def update(receipt):
        if error := failures.pop(0):
            raise error
        engine["subscriber"].receive(receipt.version, timeout_s=TIMEOUT_S)

    with SharedMemoryTransport("policy", owner=True, root=str(tmp_path)) as transport:
        transfer = TrlTransfer(
            FaultyTransport(transport, {"commit": [None, OSError("disk full")]}),
            attach=attach,
            update=update,
            run=lambda coroutine, timeout_s: asyncio.run(coroutine),
            timeout_s=TIMEOUT_S,
        )
        weight = torch.nn.Parameter(torch.zeros(4))
        versions = []
        for step, error in enumerate([RuntimeError, TransferError, None, None]):
            weight.data.fill_(step)
            if error is None:
                transfer.send_weights([("weight", weight)])
                assert engine["weight"].tolist() == [step] * 4
            else:
                with pytest.raises(error):
                    transfer.send_weights([("weight", weight)])
            versions.append(transfer.version)
        assert versions == [1, 1, 2, 3]
        assert not any(tensor.requires_grad for tensor in transfer._held.values())
        engine["subscriber"].close()
        transfer.destroy()


def test_one_of_several_ranks_sends(tmp_path):
    assert ranks.run(_send_on_rank_0, tmp_path) == [[1, 2], None]


def _send_on_rank_0(folder):
    """As TRL calls it: on the main rank only."""
    if dist.get_rank() > 0:
        return None

    async def nothing(_): ...

    with SharedMemoryTransport("policy", owner=True, root=str(folder)) as transport:
        transfer = TrlTransfer(
            transport,
            attach=nothing,
            update=nothing,
            run=lambda coroutine, timeout_s: asyncio.run(coroutine),
            timeout_s=TIMEOUT_S,
        )
        for _ in range(2):
            transfer.send_weights([("weight", torch.ones(4))])
        transfer.destroy()
        return [receipt.version for receipt in transfer.receipts]
