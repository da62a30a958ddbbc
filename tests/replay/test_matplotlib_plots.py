import sys
from dataclasses import fields

import numpy as np
import pytest
import torch

from primeblocks.errors import MissingPackageError
from primeblocks.kvoffload.tier import TierStatistics
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


def test_metrics_have_a_line_each_and_a_gap_where_there_is_none():
    history = [{"training/global_step": 3, "reward": 0.5}, {"training/global_step": 4}]
    (line,) = plots.plot_metrics(history, "reward").get_lines()
    np.testing.assert_array_equal(line.get_xdata(), [3, 4])
    np.testing.assert_array_equal(line.get_ydata(), [0.5, np.nan])


def test_shares_of_ages_add_up():
    axes = plots.plot_staleness([{0: 6, 2: 2}, {1: 4}])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "age 0",
        "age 1",
        "age 2",
    ]
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in axes.collections]
    assert tops == [0.75, 1.0, 1.0]


def test_tiers_are_side_by_side_also_as_words():
    counts = {each.name: 0 for each in fields(TierStatistics)}
    host = TierStatistics(**counts | {"hits": 3, "misses": 1, "stores": 4, "evictions": 2})
    axes = plots.plot_tiers({"host": host, "disk": {"hits": 5}})
    assert [bar.get_height() for bar in axes.patches] == [3, 1, 4, 2, 5, 0, 0, 0]
    starts = [bar.get_x() for bar in axes.patches]
    assert len({round(start, 6) for start in starts}) == 8


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
