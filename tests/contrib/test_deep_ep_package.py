"""Which deep_ep is taken, and which is refused. The one that is taken here is a FAKE."""

import sys
import types

import pytest
import torch.distributed as dist

from primeblocks.contrib.adapters.deep_ep import buffer_dispatcher, elastic_dispatcher
from primeblocks.errors import MissingPackageError, PlanError, ShapeError, UnsupportedError
from tests.contrib import fake_deep_ep

BUILDERS = {
    "elastic": lambda **changed: elastic_dispatcher(
        dist.ProcessGroup(0, 2), **{"max_tokens": 9, "hidden": 8, "top_k": 2} | changed
    ),
    "buffer": lambda **changed: buffer_dispatcher(
        dist.ProcessGroup(0, 2), **{"hidden": 8} | changed
    ),
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_an_absent_deep_ep_is_named(build, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(MissingPackageError, match="deep_ep is not installed. Build it as https"):
        build()


def test_a_deep_ep_that_fails_to_import_says_why(monkeypatch, tmp_path):
    (tmp_path / "deep_ep.py").write_text("raise OSError('libnvshmem_host.so.3')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    with pytest.raises(UnsupportedError, match="its import fails with OSError: libnvshmem_host"):
        BUILDERS["elastic"]()
    assert "deep_ep" not in sys.modules


def _drifted(change):
    package = types.ModuleType("deep_ep")
    package.__dict__.update(vars(fake_deep_ep), __version__="9.9")
    change(package)
    return package


def _rename_num_sms(package):
    class ElasticBuffer(fake_deep_ep.ElasticBuffer):
        def dispatch(self, x, topk_idx, topk_weights, num_experts, handle):
            raise AssertionError

    package.ElasticBuffer = ElasticBuffer


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("elastic", _rename_num_sms, r"lacks ElasticBuffer.dispatch\(num_sms=\)\. This"),
        ("buffer", lambda p: delattr(p, "Buffer"), "lacks Buffer, .* written for DeepEP 1.2"),
    ],
)
def test_a_fake_deep_ep_of_another_version_is_refused_by_name(kind, change, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", _drifted(change))
    with pytest.raises(UnsupportedError, match=said):
        BUILDERS[kind]()


@pytest.mark.parametrize(
    ("kind", "size", "error", "said"),
    [
        ("elastic", {"hidden": 12}, ShapeError, "multiple of 8; got 12"),
        ("buffer", {"alignment": 0}, PlanError, "must be at least 1; got 0"),
        ("elastic", {"max_tokens": 0}, PlanError, "got 0 and 2"),
    ],
)
def test_sizes_are_refused_before_deep_ep_is_imported(kind, size, error, said):
    with pytest.raises(error, match=said):
        BUILDERS[kind](**size)
