import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import ShapeError
from primeblocks.groups import all_gather_rows, all_to_all_rows
from primeblocks.testing import ranks

DTYPES = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8]


def _count(source, target):
    """Rows from source to target: ragged, some pairs empty, and rank 1 sends nothing."""
    return 0 if source == 1 else (2 * source + 3 * target) % 4


def _rows(source, target):
    """Small integers, exact in every dtype; float64 first, as fp8 has no arithmetic."""
    n = _count(source, target)
    return (source + 2 * target + torch.arange(2 * n, dtype=torch.float64).view(n, 2)) % 16


def _exchange(dtype):
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = {
        "send_counts": [_count(rank, peer) for peer in range(size)],
        "receive_counts": [_count(peer, rank) for peer in range(size)],
    }
    x = torch.cat([_rows(rank, peer) for peer in range(size)]).to(dtype)
    return all_to_all_rows(x, **counts, group=dist.group.WORLD).double()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_arrive_by_sender(dtype):
    for rank, got in enumerate(ranks.run(_exchange, dtype, world_size=3)):
        assert torch.equal(got, torch.cat([_rows(peer, rank) for peer in range(3)]))


def _gradient():
    rank, size = dist.get_rank(), dist.get_world_size()
    send = [_count(rank, peer) for peer in range(size)]
    receive = [_count(peer, rank) for peer in range(size)]
    x = torch.ones(sum(send), 2, dtype=torch.float64, requires_grad=True)
    counts = {"send_counts": send, "receive_counts": receive}
    got = all_to_all_rows(x, **counts, group=dist.group.WORLD)
    # The gradient of a row says who received it. An expanded one, as sum() makes, has stride 0.
    (got.sum() * (rank + 1)).backward()
    return x.grad


def test_gradients_return_the_way_the_rows_came():
    for rank, grad in enumerate(ranks.run(_gradient, world_size=3)):
        receiver = [peer + 1.0 for peer in range(3) for _ in range(_count(rank, peer))]
        assert grad[:, 0].tolist() == receiver


def _gather(dtype):
    rank = dist.get_rank()
    return [part.double() for part in all_gather_rows(_own(rank, dtype), group=dist.group.WORLD)]


def _own(rank, dtype):
    n = (0, 3, 1)[rank]
    return (10 * rank + torch.arange(2 * n, dtype=torch.float64).view(n, 2)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rank_gets_all_rows(dtype):
    for got in ranks.run(_gather, dtype, world_size=3):
        assert len(got) == 3
        for rank, part in enumerate(got):
            assert torch.equal(part, _own(rank, dtype).double())


def _refusals():
    said = []
    for counts in ([1, 2], [3], [1, 1, 1], [4, -1]):
        with pytest.raises(ShapeError) as caught:
            all_to_all_rows(
                torch.zeros(2 if counts == [1, 2] else 3, 1),
                send_counts=counts,
                receive_counts=[0, 0],
                group=dist.group.WORLD,
            )
        said.append(str(caught.value))
    dist.barrier()  # Nothing was sent: the group still works.
    return said


def test_counts_that_do_not_fit_are_refused():
    for said in ranks.run(_refusals, world_size=2):
        assert "add up to the 2 rows" in said[0]
        assert "2 ranks needs 2 counts" in said[1]
        assert "2 ranks needs 2 counts" in said[2]
        assert "add up to the 3 rows" in said[3]
