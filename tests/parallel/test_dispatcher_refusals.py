"""What dispatchers refuse, on all ranks alike, before anything is sent."""

import re

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import PlanError, RankError, ShapeError
from primeblocks.parallel.experts import AllToAllDispatcher, LocalDispatcher
from primeblocks.testing import ranks
from tests.parallel.bodies import each
from tests.parallel.test_dispatchers import SHARED, _three

EXPERTS, HIDDEN = 12, 5

BAD_INPUTS = {
    "ShapeError: .*the layer has experts 0 to 11": {"ids": torch.tensor([[0, 12]])},
    r"ShapeError: .*are between -1 and 0": {"ids": torch.tensor([[0, -1]])},
    "ShapeError: .*must be integers, .*; got torch.float32": {"ids": torch.zeros(1, 2)},
    r"ShapeError: .*expert_ids \(2, 2\) differ": {
        "ids": torch.zeros(2, 2).long(),
        "x": torch.zeros(2, 5),
    },
    r"ShapeError: .*got \(1, 1, 5\)": {"x": torch.zeros(1, 1, 5)},
    r"ShapeError: .*got \(\) and \(1, 2\)": {"x": torch.tensor(1.0)},
    r"ShapeError: .*got \(1, 5\) and \(\)": {"ids": torch.tensor(0)},
    "ShapeError: .*must be integers, .*; got torch.bool": {"ids": torch.zeros(1, 2).bool()},
    "ShapeError: .*signed or uint8; got torch.uint16": {"ids": torch.zeros(1, 2).to(torch.uint16)},
    r"ShapeError: .*got \(3, 5\) and \(1, 2\)": {"x": torch.zeros(3, 5)},
    "ShapeError: 1 of 2 scores are NaN .*meta model are NaN until load_pretrained": {
        "scores": torch.tensor([[1.0, torch.nan]])
    },
    "ShapeError: 2 of 2 scores are NaN or infinite": {"scores": torch.full((1, 2), torch.inf)},
}
# What only a group can get wrong.
BAD_LAYERS = {
    "PlanError: 7 experts cannot be shared equally by 2 ranks": {"num_experts": 7},
    r"PlanError: num_experts must be equal .* it is \[12, 14\]": {"num_experts": 14},
    r"PlanError: x dim 1 must be equal .* it is \[5, 6\]": {"x": torch.zeros(1, 6)},
    r"PlanError: x dtype must be equal .* it is \[torch.float32, torch.float64\]": {
        "x": torch.zeros(1, HIDDEN).double()
    },
    r"PlanError: x requires_grad must be equal .* it is \[0, 1\]": {
        "x": torch.zeros(1, HIDDEN).requires_grad_()
    },
    r"PlanError: scores requires_grad must be equal .* it is \[0, 1\]": {
        "scores": torch.ones(1, 2).requires_grad_()
    },
    r"PlanError: scores dtype must be equal .* it is \[torch.float32, torch.float64\]": {
        "scores": torch.ones(1, 2).double()
    },
    r"PlanError: top_k must be equal .* it is \[2, 3\]": {
        "ids": torch.zeros(1, 3).long(),
        "scores": torch.ones(1, 3),
    },
}


def _dispatch(dispatcher, *, x=None, ids=None, scores=None, num_experts=EXPERTS):
    x = torch.zeros(1, HIDDEN) if x is None else x
    ids = torch.zeros(1, 2, dtype=torch.int64) if ids is None else ids
    scores = torch.ones(1, 2) if scores is None else scores
    return dispatcher.dispatch(x, scores, ids, num_experts=num_experts)


def _said(dispatcher, **bad):
    try:
        _dispatch(dispatcher, **bad)
    except (PlanError, RankError, ShapeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("said", BAD_INPUTS)
def test_bad_slots_are_refused(said):
    assert re.match(said, _said(LocalDispatcher(), **BAD_INPUTS[said]))


def _refusals(name):
    """Rank 1 alone makes the mistake."""
    dispatcher = SHARED[name](dist.group.WORLD)
    wrong = dist.get_rank() == 1
    found = {}
    for said, bad in (BAD_INPUTS | BAD_LAYERS).items():
        found[said] = _said(dispatcher, **(bad if wrong else {}))
        # Nothing was sent before the refusal: the group still works.
        assert _dispatch(dispatcher).counts.sum() == 4 * (not wrong)
    return found


def test_one_ranks_mistake_is_an_error_on_all():
    for there, here in zip(*ranks.run(each, _refusals, [(name,) for name in SHARED]), strict=True):
        for said, text in here.items():
            assert re.match(said, text), text
            if " must be equal " in said:
                assert there[said] == text
            else:
                assert there[said].startswith("RankError: rank 1 of the group refused its argum")
                assert text[:300] in there[said]


def _unchecked():
    """Nothing is agreed on, and nobody looks at values."""
    gather, gathered = dist.all_gather, []

    def counted(*tensors, group):
        gathered.append(group)
        return gather(*tensors, group=group)

    dist.all_gather = counted
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
