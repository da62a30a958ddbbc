import sys

import numpy as np
import pytest
import torch

from primeblocks.errors import MissingPackageError
from primeblocks.replay import Routes, attribute, compare
from primeblocks.replay.adapters import matplotlib as plots


def test_tokens_are_drawn_worst_first():
    log_ratio = torch.tensor([0.0, -1.0, 0.5])
    axes = plots.plot_tokens({"own": log_ratio, "replayed": 0 * log_ratio})
    first, second = axes.get_lines()
    wide = log_ratio.double()
    expected = (torch.expm1(wide) - wide).sort(descending=True).values.clamp_min(1e-16)
    np.testing.assert_allclose(first.get_ydata(), expected)
    assert (second.get_ydata() == 1e-16).all()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["own", "replayed"]


def test_ratios_are_counted():
    axes = plots.plot_ratios({"own": torch.linspace(-1, 1, 100)})
    (patch,) = axes.patches
    assert axes.get_yscale() == "log"
    assert patch.get_xy()[:, 0].min() == pytest.approx(-1)


def test_agreement_has_a_bar_for_each_layer():
    a, b = (
        Routes.from_array(np.array(rows), num_experts=4, layer_ids=[2, 5])
        for rows in ([[[0, 1], [2, 3]]], [[[1, 0], [2, 1]]])
    )
    axes = plots.plot_agreement(compare(a, b))
    centres = [bar.get_x() + bar.get_width() / 2 for bar in axes.patches]
    assert centres == pytest.approx([2, 5])
    assert [bar.get_height() for bar in axes.patches] == [1.0, 0.0]


def test_attribution_ends_with_the_residual():
    rollout = torch.full((4,), -1.0)

    def evaluate(removed):
        return rollout + (0.1 if "routes" in removed else 0.5)

    report = attribute(evaluate, rollout, causes=["routes"])
    given = plots.Figure().subplots()
    axes = plots.plot_attribution(report, axes=given)
    assert axes is given
    assert [label.get_text() for label in axes.get_yticklabels()] == ["routes", "residual"]
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == pytest.approx([report.causes[0].share, report.residual])


def test_nothing_global_is_touched():
    plots.plot_tokens({"own": torch.zeros(3)})
    assert (
        "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    )


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, plots.__name__)
    with pytest.raises(MissingPackageError, match=r"pip install '\.\[plots\]'"):
        __import__(plots.__name__)
