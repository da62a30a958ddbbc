from functools import cache

import pytest
import torch
import torch.distributed as dist

from primeblocks import groups
from primeblocks.errors import CapacityError, PlanError, RankError, ShapeError
from primeblocks.groups import agreed, all_gather_rows, all_to_all_rows
from primeblocks.testing import ranks
from primeblocks.testing.oracles import StepCounter

DTYPES = [
    *(torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int16),
    *(torch.uint8, torch.uint16, torch.uint32),
]


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
    group = dist.group.WORLD
    gathered = all_gather_rows(x[:1], rows=2, group=group).double()
    return all_to_all_rows(x, **counts, group=group).double(), gathered


def _exchanges():
    return [_exchange(dtype) for dtype in DTYPES]


def _all_bodies():
    return {body.__name__: body() for body in BODIES}


@cache
def _gang():
    return ranks.run(_all_bodies, world_size=3)


def _on_three(body):
    """What a body returned on each rank. One gang runs all of `BODIES`."""
    return [found[body.__name__] for found in _gang()]


def test_rows_arrive_by_sender():
    for rank, found in enumerate(_on_three(_exchanges)):
        first = [torch.cat([_rows(peer, to) for to in range(3)])[:1] for peer in range(3)]
        padded = torch.cat([torch.cat([x, torch.zeros(2 - len(x), 2)]) for x in first])
        for got, gathered in found:
            assert torch.equal(got, torch.cat([_rows(peer, rank) for peer in range(3)]))
            assert torch.equal(gathered, padded)


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
    for rank, grad in enumerate(_on_three(_gradient)):
        receiver = [peer + 1.0 for peer in range(3) for _ in range(_count(rank, peer))]
        assert grad[:, 0].tolist() == receiver


def _refusals():
    said = []
    for rows, counts in ((2, [1, 2, 0]), (3, [3]), (3, [1, 1, 1, 0]), (3, [4, -1, 0])):
        with pytest.raises(ShapeError) as caught:
            all_to_all_rows(
                torch.zeros(rows, 1),
                send_counts=counts,
                receive_counts=[0, 0, 0],
                group=dist.group.WORLD,
            )
        said.append(str(caught.value))
    dist.barrier()  # Nothing was sent: the group still works.
    return said


def test_counts_that_do_not_fit_are_refused():
    for said in _on_three(_refusals):
        assert "add up to the 2 rows" in said[0]
        assert "3 ranks needs 3 counts" in said[1]
        assert "3 ranks needs 3 counts" in said[2]
        assert "add up to the 3 rows" in said[3]


def _agreement(case):
    """What each rank is told, and that the group works afterwards."""
    facts, problem = CASES[case](dist.get_rank())
    said, raised = "agreed", None
    try:
        with agreed("a call", group=dist.group.WORLD) as call:
            call.facts |= facts
            if problem is not None:
                raise problem
    except (CapacityError, PlanError, RankError, ShapeError) as error:
        said, raised = f"{type(error).__name__}: {error}", error
    assert problem is None or raised is problem
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == dist.get_world_size()
    return said


CASES = {
    "alike": lambda rank: ({"heads": 4, "plan": 2**63 - 1, "shift": -3}, None),
    "nothing to say": lambda rank: ({}, None),
    "as many as there is room for": lambda rank: ({f"f{i}": i for i in range(16)}, None),
    "the first": lambda rank: ({"heads": rank, "tokens": 1}, None),
    "the second": lambda rank: ({"heads": 4, "tokens": 5 + (rank == 2)}, None),
    "the last of many": lambda rank: ({f"f{i}": i * (rank < 2 or i < 15) for i in range(16)}, None),
    "one problem": lambda rank: ({"heads": rank}, ShapeError("bad x") if rank == 1 else None),
    "two problems": lambda rank: ({}, PlanError(f"mine, {rank}") if rank else None),
    "all have one": lambda rank: ({}, ShapeError(f"mine, {rank}")),
    "a long one": lambda rank: ({}, ShapeError("x" * 999) if rank == 2 else None),
    # A character of three bytes, cut in the middle: "ShapeError: " takes 12 of the 400.
    "cut inside a letter": lambda rank: ({}, ShapeError("→" * 200) if rank == 2 else None),
    "more than can be compared": lambda rank: ({"f": "x" * (3000 if rank == 1 else 1)}, None),
    "no words": lambda rank: ({}, ShapeError("") if rank == 0 else None),
    "other facts where the problem is": lambda rank: (
        {"heads": 1} if rank else {},
        None if rank else ShapeError("no tensor"),
    ),
}


def _agreements():
    return {case: _agreement(case) for case in CASES}


def _told(case):
    """What each rank is told."""
    return [told[case] for told in _on_three(_agreements)]


@pytest.mark.parametrize("case", ["alike", "nothing to say", "as many as there is room for"])
def test_what_is_equal_is_agreed_on(case):
    assert _told(case) == ["agreed"] * 3


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("the first", "heads must be equal on all ranks; by rank it is [0, 1, 2]."),
        ("the second", "tokens must be equal on all ranks; by rank it is [5, 5, 6]."),
        ("the last of many", "f15 must be equal on all ranks; by rank it is [15, 15, 0]."),
    ],
)
def test_a_fact_that_differs_is_an_error_on_all(case, said):
    assert _told(case) == [f"PlanError: {said}"] * 3


REFUSED = "RankError: rank {} of the group refused its arguments: "


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("one problem", (1, "ShapeError: bad x")),
        ("two problems", (1, "PlanError: mine, 1")),
        ("a long one", (2, "ShapeError: " + "x" * 388)),
        ("cut inside a letter", (2, "ShapeError: " + "→" * 129 + "\N{REPLACEMENT CHARACTER}")),
        ("no words", (0, "ShapeError:")),
        ("other facts where the problem is", (0, "ShapeError: no tensor")),
    ],
)
def test_a_problem_is_an_error_on_all(case, said):
    """Every rank raises what it has itself, the others repeat the first rank's."""
    for rank, text in enumerate(_told(case)):
        problem = CASES[case](rank)[1]
        own = f"{type(problem).__name__}: {problem}"
        assert text == (REFUSED.format(said[0]) + said[1] if problem is None else own)


def test_facts_too_long_to_compare_are_an_error_on_all():
    said = "CapacityError: a call compares at most 2048 bytes of arguments between ranks"
    told = _told("more than can be compared")
    assert told[1].startswith(said)
    assert all(each.startswith(REFUSED.format(1) + said) for each in told[::2])


def test_everyone_has_a_problem():
    assert _told("all have one") == [f"ShapeError: mine, {rank}" for rank in range(3)]


def _unchecked():
    """What each rank is told where only rank 1 has a problem, and ranks differ in a fact."""
    said = "nothing"
    try:
        with agreed("a call", group=dist.group.WORLD, check=False) as call:
            call.facts["heads"] = dist.get_rank()
            call.numbers = torch.ones(3, dtype=torch.int64)
            if dist.get_rank() == 1:
                raise ShapeError("mine")
        assert call.told == []
    except ShapeError as error:
        said = str(error)
    dist.barrier()
    return said


def test_without_a_check_a_rank_raises_its_own_problem_alone():
    assert _on_three(_unchecked) == ["nothing", "mine", "nothing"]


def _alone():
    gathers = []
    groups._gather = lambda *args: gathers.append(args)
    with agreed("a call", group=dist.group.WORLD) as call:
        call.facts["heads"] = 4
    with pytest.raises(ShapeError, match="mine"), agreed("a call", group=dist.group.WORLD):
        raise ShapeError("mine")
    return len(gathers)


def _carried(bad):
    """What each rank carries comes to all, and one whose numbers are bad refuses for all."""
    rank = dist.get_rank()

    def judge(numbers):
        return ShapeError(f"{numbers[0]} is too much") if numbers[0] == 7 else None

    mine = torch.tensor([7 if rank == bad else rank, 2**62, -3])
    try:
        with agreed("a call", group=dist.group.WORLD) as call:
            call.numbers, call.judge = mine, judge
    except (RankError, ShapeError) as error:
        return f"{type(error).__name__}: {error}"
    return call.told


def _carried_well_and_badly():
    return _carried(None), _carried(0)


def _cost():
    """An agreement without numbers, on three ranks."""
    with StepCounter() as step, agreed("a call", group=dist.group.WORLD) as call:
        call.facts["heads"] = 4
    assert call.told == []
    return dict(step.collectives), sum(step.received_bytes.values())


def test_an_agreement_is_one_gather_into_one_tensor():
    """A gather into a list copies each rank's part once more on a GPU."""
    assert _on_three(_cost) == [({"_allgather_base_": 1}, 2 * (40 + 16 * 3))] * 3


def _one_rank():
    return _carried_well_and_badly(), _alone()


def test_numbers_travel_with_an_agreement_and_bad_ones_are_refused():
    said = "ShapeError: 7 is too much"
    everyone = [[rank, 2**62, -3] for rank in range(3)]
    others = [REFUSED.format(0) + said] * 2
    assert _on_three(_carried_well_and_badly) == [(everyone, told) for told in (said, *others)]


def test_a_rank_alone_waits_for_no_device():
    said = "ShapeError: 7 is too much"
    assert ranks.run(_one_rank, world_size=1) == [(([[0, 2**62, -3]], said), 0)]


BODIES = (_exchanges, _gradient, _refusals, _agreements, _unchecked, _cost, _carried_well_and_badly)
