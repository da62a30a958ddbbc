"""What the adapter of torchtitan refuses, and that nothing is changed or lost by it."""

import importlib
import sys

import pytest
import torch.distributed as dist
from torch import nn

from primeblocks.errors import (
    MissingPackageError,
    PlanError,
    RankError,
    ShapeError,
    UnsupportedError,
)
from primeblocks.testing import ranks

pytest.importorskip("torchtitan", reason="torchtitan cannot be imported")

from primeblocks.parallel.adapters import torchtitan as adapter
from tests.parallel.test_torchtitan_dispatchers import (
    EXPERTS,
    SIZES,
    FromTorchtitan,
    batch,
    config_of,
    model_of,
    parallel_dims,
    through_ours,
    titan,
    use_dispatcher,
)


def _theirs(kind=titan.LocalTokenDispatcher, **options):
    return kind.Config(**SIZES, **options).build()


def test_dispatchers_that_do_more_are_refused_and_nothing_changes():
    with pytest.raises(
        UnsupportedError, match="Linear does not contain RoutedExperts of torchtitan 0.3.0"
    ):
        use_dispatcher(nn.Linear(2, 2))
    padding = _theirs(titan.TorchAOTokenDispatcher, pad_multiple=16)
    with pytest.raises(UnsupportedError, match="TorchAOTokenDispatcher is not one of the tested"):
        FromTorchtitan(padding)
    layers = nn.ModuleList([model_of(config_of()), model_of(config_of())])
    layers[1].routed_experts.token_dispatcher = padding
    with pytest.raises(UnsupportedError, match="TorchAOTokenDispatcher is not one"):
        use_dispatcher(layers)
    assert type(layers[0].routed_experts.token_dispatcher) is titan.AllToAllTokenDispatcher
    config = config_of()
    config.routed_experts.token_dispatcher = titan.TorchAOTokenDispatcher.Config(
        **SIZES, pad_multiple=16
    )
    with pytest.raises(UnsupportedError, match="TorchAOTokenDispatcher.Config is not one"):
        use_dispatcher(config)


def test_bad_input_is_refused_before_its_dispatcher_sees_it():
    ours = FromTorchtitan(_theirs())
    x, scores, ids = batch(4, seed=0)
    for bad in [
        (x, scores[:3], ids),
        (x, scores, scores),
        (x, scores, ids + 8),
        (x, scores / 0, ids),
    ]:
        with pytest.raises(ShapeError):
            ours.dispatch(*bad, num_experts=EXPERTS)
    with pytest.raises(
        PlanError, match="9 experts, 3 per token, over 1 ranks. .* for 8 experts and 3 per"
    ):
        ours.dispatch(x, scores, ids, num_experts=9)
    with pytest.raises(PlanError, match="8 experts, 2 per token"):
        ours.dispatch(x, scores[:, :2], ids[:, :2], num_experts=EXPERTS)
    sent = ours.dispatch(x, scores, ids, num_experts=EXPERTS)
    with pytest.raises(ShapeError, match=r"needs one row for each of 12 slots; got \(11, 16\)"):
        ours.combine(sent.tokens[1:], sent)


def _one_rank_is_wrong():
    mesh = parallel_dims(dist.get_world_size(), expert=dist.get_world_size()).get_mesh("ep")
    theirs = _theirs(titan.AllToAllTokenDispatcher)
    theirs.wire_meshes(ep_mesh=mesh)
    x, scores, ids = batch(4, seed=0)
    with pytest.raises(ShapeError if dist.get_rank() else RankError, match="are between"):
        FromTorchtitan(theirs).dispatch(x, scores, ids + 8 * dist.get_rank(), num_experts=EXPERTS)
    through_ours(FromTorchtitan(theirs), x, scores, ids, first=4 * dist.get_rank())


def test_one_ranks_mistake_is_an_error_on_all_and_the_next_call_works():
    ranks.run(_one_rank_is_wrong, world_size=2)


def _import_anew(monkeypatch):
    monkeypatch.delitem(sys.modules, adapter.__name__)
    return importlib.import_module(adapter.__name__)


def test_other_versions_are_refused(monkeypatch):
    monkeypatch.setattr("torchtitan.__version__", "0.3.1")
    with pytest.raises(UnsupportedError, match=r"found 0\.3\.1\. .* torchtitan==0\.3\.0"):
        _import_anew(monkeypatch)


@pytest.mark.parametrize("package", ["torchtitan", "torchtitan.models.common.moe"])
def test_a_missing_package_is_named(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"{package} .* '\.\[torchtitan\]'"):
        _import_anew(monkeypatch)
