"""Sides of a proof that are odd: no tensors, other kinds of them, parts, views, texts from JSON."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from primeblocks.errors import PlanError, TransferError
from primeblocks.layout import Shard
from primeblocks.weightsync import describe, plan_sync, verify_engine
from primeblocks.weightsync.observed import Observed, digest_form, digest_tensors, observe
from tests.weightsync.test_verify import PLAN, SHAPES, WIRINGS, Engine, Tied, weights

ODD = {
    "a number": (5, "got 5"),
    "a text": ("weights", "got 'weights'"),
    "numbers": ([5], "got (5|\\[5)"),
    "nothing in a list": ([None], "got (None|\\[None)"),
    "two in a tuple": (({}, {}), "got .{}, {}"),
    "numbers for names": ({1: torch.ones(2)}, "1 is "),
    "numbers for tensors": ({"a": 1, "b": 2}, "'a' is int"),
    "nothing for digests": ({"a": [], "b": ["x"]}, "'a' is list"),
    "a sparse tensor": ({"a": torch.ones(4, 3).to_sparse()}, "'a' is torch.sparse_coo"),
    "a lazy layer": (nn.LazyLinear(3), "'weight' has no shape yet"),
}


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(("odd", "said"), ODD.values(), ids=ODD)
def test_what_is_no_tensors_by_name_is_refused_on_both_sides(odd, said, planned):
    mine = {"a": torch.ones(4, 3), "b": torch.ones(5)}
    plan = plan_sync([describe(mine)], describe(mine), bucket_bytes=64) if planned else None
    for engine in (odd, lambda: odd):
        with pytest.raises(PlanError, match=said):
            verify_engine(mine, engine, plan=plan)
    with pytest.raises(PlanError, match=said):
        verify_engine(odd, mine, plan=plan)


@pytest.mark.parametrize("how", ["planned", "by name"])
def test_equal_numbers_of_another_kind_are_not_the_weights(how):
    mine = {"a": torch.ones(4, 3), "n": torch.ones(5, dtype=torch.int64)}
    plan = plan_sync([describe(mine)], describe(mine), bucket_bytes=64)
    kinds = (torch.int32, torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64)
    for dtype in kinds:
        held = {name: tensor.to(dtype) for name, tensor in mine.items()}
        found = verify_engine(mine, held, plan=plan if how == "planned" else None)
        assert list(found.differing) == ["a", "n"], dtype
    halved = {"a": mine["a"].half(), "n": mine["n"]}
    assert verify_engine(mine, halved, plan=plan if how == "planned" else None).is_proved
    held = {name: tensor.to("meta") for name, tensor in mine.items()}
    assert list(verify_engine(mine, held, plan=plan).unobservable) == ["a", "n"]
    with pytest.raises(PlanError, match="meta device"):
        digest_tensors(held)


def test_a_view_is_no_tie_to_what_it_is_a_part_of():
    fused = torch.arange(12.0).view(6, 2)
    both, part = {"qkv": fused, "q": fused[:2]}, {"q": fused[:2].clone()}
    assert list(verify_engine(both, part).missing) == ["qkv"]
    assert list(verify_engine(digest_tensors(both), part).missing) == ["qkv"]
    assert list(verify_engine(part, both).unexpected) == ["qkv"]
    plan = plan_sync([describe(part)], describe(part), bucket_bytes=64)
    assert verify_engine(part, both, plan=plan).unexpected == {"qkv": "reader 0"}
    assert verify_engine(part, {**part, "also": part["q"]}, plan=plan).is_proved


def test_tensors_without_elements_are_missed_like_others():
    mine = {"a": torch.ones(2), "e": torch.ones(0, 3), "f": torch.ones(0)}
    plan = plan_sync([describe(mine)], describe(mine), bucket_bytes=64)
    for held, wrong in (
        (mine, set()),
        ({"a": mine["a"], "f": mine["f"]}, {"e"}),
        ({**mine, "e": torch.ones(0, 4)}, {"e"}),
    ):
        assert set(verify_engine(mine, held, plan=plan).wrong) == wrong
        assert set(verify_engine(mine, held).wrong) == wrong
        seen = Observed.from_json(json.loads(json.dumps(observe(plan, held).to_json())))
        assert set(verify_engine(mine, seen, plan=plan).wrong) == wrong
    less = {"a": mine["a"], "f": mine["f"]}
    assert list(verify_engine(less, mine).unexpected) == ["e"]
    assert verify_engine({"f": mine["f"]}, {"f": mine["f"]}).is_proved


def test_tensors_that_nothing_leads_to_are_reported():
    sent, engine = weights(1), Engine()
    engine.load(sent)
    engine.held[1]["lonely"] = torch.ones(2)
    for plan in (None, PLAN):
        found = verify_engine(sent, engine.held, into=WIRINGS, plan=plan)
        assert found.unexpected == {"lonely": "reader 1"}
        assert not found.is_proved
        assert not found.wrong
        with pytest.raises(TransferError, match="1 unexpected, such as 'lonely'"):
            found.raise_if_wrong()


def test_pairs_that_can_be_read_once_are_compared_whole():
    model, engine = Tied(), Tied()
    engine.load_state_dict(model.state_dict())
    held = dict(engine.named_parameters())
    assert verify_engine(model.named_parameters(), iter(held.items())).is_proved
    lacks = {name: one for name, one in held.items() if name != "norm.bias"}
    assert list(verify_engine(model.named_parameters(), lacks).missing) == ["norm.bias"]
    plan = plan_sync([describe(model)], describe(model), bucket_bytes=64)
    for given in (plan, None):
        more = iter([*held.items(), ("lonely", torch.ones(1))])
        assert list(verify_engine(model, more, plan=given).unexpected) == ["lonely"]


def test_without_a_plan_every_reader_and_every_name_has_to_be_shown():
    sent, engine = weights(1), Engine()
    engine.load(sent)
    found = verify_engine(sent, engine.held[:1], into=WIRINGS)
    assert found.missing["model.norm.weight"] == "reader 1, not observed"
    assert set(found.missing) == set(SHAPES)
    assert verify_engine(sent, engine.held[:1], into=WIRINGS, plan=PLAN).is_proved
    found = verify_engine(sent | {"lm_head.weight": torch.ones(3)}, engine.held, into=WIRINGS)
    assert found.missing == {"lm_head.weight": "no wiring of into= leads from it"}


def test_boxes_that_overlap_hide_no_gap():
    sent = {"w": torch.arange(8.0)}
    plan = plan_sync([describe(sent)], describe(sent), bucket_bytes=64)
    whole = observe(plan, sent)
    for spans, is_proved in (([(0, 4), (2, 4)], False), ([(0, 5), (3, 5)], True)):
        seen = []
        for at, size in spans:
            part = sent["w"][at : at + size]
            form = whole.forms[0][0]._replace(
                box=Shard((at,), (size,)), digest=digest_form("held", part)
            )
            seen.append(replace(whole, forms=((form,),)))
        assert verify_engine(sent, seen, plan=plan).is_proved is is_proved


def test_observations_that_do_not_fit_the_plan_are_refused():
    sent = {"a": torch.ones(4, 3), "b": torch.ones(5)}
    plan = plan_sync([describe(sent)], describe(sent), bucket_bytes=64)
    good = json.loads(json.dumps(observe(plan, sent).to_json()))
    rows = good["forms"]

    def changed(at, value):
        return {"forms": [[[*row[:at], value, *row[at + 1 :]] for row in one] for one in rows]}

    for change, said in (
        ({"reader": 7}, "reader 7 is not in the plan"),
        ({"reader": -1}, "reader -1 is not in the plan"),
        ({"forms": []}, "in 0 copies"),
        ({"forms": [], "plan": "another"}, "with plan another, in 0 copies"),
        ({"forms": rows + rows}, "in 4 copies"),
        (changed(3, "nn"), "does not describe an observation: TypeError"),
        (changed(3, "float33"), "does not describe an observation: AttributeError"),
        (
            {"forms": [[[[9, 9], [1, 1], *r[2:]] for r in one] for one in rows]},
            "has other copies",
        ),
        ({"forms": [[[[0], [1], *r[2:]] for r in one] for one in rows]}, "has other copies"),
        (
            {"forms": [[[r[0], [9] * len(r[1]), *r[2:]] for r in one] for one in rows]},
            "not inside",
        ),
    ):
        with pytest.raises(PlanError, match=said):
            verify_engine(sent, Observed.from_json({**good, **change}), plan=plan)
