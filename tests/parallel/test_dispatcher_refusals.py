"""What dispatchers refuse before anything is sent. Mistakes of one rank: test_one_rank_wrong.py."""

import pytest
import torch
import torch.distributed as dist

from primeblocks import groups
from primeblocks.errors import PlanError, ShapeError
from primeblocks.parallel.experts import AllToAllDispatcher, LocalDispatcher
from primeblocks.testing import ranks
from tests.parallel.test_dispatchers import _three

EXPERTS, HIDDEN = 12, 5

BAD_INPUTS = {
    "the layer has experts 0 to 11": {"ids": torch.tensor([[0, 12]])},
    r"are between -1 and 0": {"ids": torch.tensor([[0, -1]])},
    "must be integers, .*; got torch.float32": {"ids": torch.zeros(1, 2)},
    r"expert_ids \(2, 2\) differ": {
        "ids": torch.zeros(2, 2).long(),
        "x": torch.zeros(2, 5),
    },
    r"got \(1, 1, 5\)": {"x": torch.zeros(1, 1, 5)},
    r"got \(\) and \(1, 2\)": {"x": torch.tensor(1.0)},
    r"got \(1, 5\) and \(\)": {"ids": torch.tensor(0)},
    "must be integers, .*; got torch.bool": {"ids": torch.zeros(1, 2).bool()},
    "signed or uint8; got torch.uint16": {"ids": torch.zeros(1, 2).to(torch.uint16)},
    r"got \(3, 5\) and \(1, 2\)": {"x": torch.zeros(3, 5)},
    "1 of 2 scores are NaN .*meta model are NaN until load_pretrained": {
        "scores": torch.tensor([[1.0, torch.nan]])
    },
    "2 of 2 scores are NaN or infinite": {"scores": torch.full((1, 2), torch.inf)},
}


def _dispatch(dispatcher, *, x=None, ids=None, scores=None, num_experts=EXPERTS):
    x = torch.zeros(1, HIDDEN) if x is None else x
    ids = torch.zeros(1, 2, dtype=torch.int64) if ids is None else ids
    scores = torch.ones(1, 2) if scores is None else scores
    return dispatcher.dispatch(x, scores, ids, num_experts=num_experts)


@pytest.mark.parametrize("said", BAD_INPUTS)
def test_bad_slots_are_refused(said):
    with pytest.raises(ShapeError, match=said):
        _dispatch(LocalDispatcher(), **BAD_INPUTS[said])


def _unchecked():
    """Nothing is agreed on, and nobody looks at values."""
    gather, gathered = groups._gather, []

    def counted(head, name, group):
        gathered.append(group)
        return gather(head, name, group)

    groups._gather = counted
    found = []
    for dispatcher in _three(check=False):
        with pytest.raises(ShapeError, match="must be integers"):
            _dispatch(dispatcher, ids=torch.zeros(1, 2))
        found.append(_dispatch(dispatcher, scores=torch.full((1, 2), torch.nan)).counts.tolist())
    for dispatcher in _three(check=False)[1:]:
        with pytest.raises(PlanError, match="7 experts cannot be shared"):
            _dispatch(dispatcher, num_experts=7)
    assert not gathered
    for dispatcher in _three()[1:]:
        with torch.no_grad():  # In evaluation it does not matter who would want gradients.
            _dispatch(dispatcher, x=torch.zeros(1, HIDDEN).requires_grad_(dist.get_rank() == 0))
    assert len(gathered) == 2
    return found


def test_without_check_shapes_alone_are_looked_at():
    alone = [2] + [0] * 11
    assert ranks.run(_unchecked) == [[alone] + [[4] + [0] * 5] * 2, [alone] + [[0] * 6] * 2]


def _outsider():
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(PlanError, match="this rank is not in the group"):
            AllToAllDispatcher(group)


def test_a_rank_outside_the_group_is_refused():
    ranks.run(_outsider)


def test_outputs_must_fit_the_dispatched_rows():
    sent = _dispatch(LocalDispatcher())
    with pytest.raises(ShapeError, match=r"each of 2 slots; got \(3, 5\)"):
        LocalDispatcher().combine(torch.zeros(3, HIDDEN), sent)
    with pytest.raises(ShapeError, match=r"got \(2, 1, 5\)"):
        LocalDispatcher().combine(torch.zeros(2, 1, HIDDEN), sent)


def test_alignment_must_be_positive():
    with pytest.raises(PlanError, match="must be at least 1; got 0"):
        LocalDispatcher(alignment=0)
