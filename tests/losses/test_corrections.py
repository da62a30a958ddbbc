"""Weights and advantages against plain loops, in rows and packed, with anything in the padding."""

import inspect
import math

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import RankError, ShapeError, UsageError
from primeblocks.losses import advantages, corrections, kl_loss
from primeblocks.testing import ranks

LENGTHS = (5, 1, 0, 12, 3)


def draw(spread=1.0):
    """Sequences of tokens (p, q, entropy, advantage)."""
    generator = torch.Generator().manual_seed(6)

    def tokens(n):
        x = torch.rand(n, 4, generator=generator, dtype=torch.float64)
        p = -0.1 - 2 * x[:, 0]
        q, a = p + spread * (2 * x[:, 1] - 1), 4 * x[:, 3] - 2
        if n == 1:  # Far off, and just above 0.
            q, a = p + 0.9, a.abs() / 2
        return torch.stack([p, q, x[:, 2], a], 1)

    return [tokens(n) for n in LENGTHS]


def padded(sequences):
    rows = torch.full((len(sequences), 14, 4), math.nan, dtype=torch.float64)
    mask = torch.zeros(len(sequences), 14, dtype=torch.bool)
    for row, x in enumerate(sequences):
        rows[row, 1 : len(x) + 1], mask[row, 1 : len(x) + 1] = x, True
    return (*rows.unbind(-1), mask, None)


def packed(sequences):
    gap = torch.full((1, 4), -math.inf, dtype=torch.float64)
    line = torch.cat([torch.cat([x, gap]) for x in sequences])
    ids = torch.tensor([9 - i for i, x in enumerate(sequences) for _ in range(len(x) + 1)])
    return (*line.unbind(-1), line[:, 0].isfinite(), ids)


def logs(sequences):
    return [[(p - q).item() for p, q, *_ in x] for x in sequences]


def check(found, mask, want, *, samples, truncated=None, sequence_level=False):
    """Compare weights by sequence, and counts with what they say."""
    flat = [w for sequence in want for w in sequence]
    assert found.weights[mask].tolist() == pytest.approx(flat, rel=1e-12)
    assert found.weights[~mask].eq(0).all()
    assert not found.weights.requires_grad
    assert found.tokens == len(flat) == found.kept + found.truncated + found.masked
    assert found.masked == sum(w == 0 for w in flat)
    assert found.truncated == (truncated or 0)
    ws = [sequence[0] for sequence in want if sequence] if sequence_level else flat
    squares = sum(w * w for w in ws)
    ess = sum(ws) ** 2 / squares if squares else 0
    assert found.ess == pytest.approx(ess, rel=1e-12)
    assert found.samples == samples == len(ws)


def by_level(sequence, level):
    if level == "token":
        return sequence
    mean = sum(sequence) / (len(sequence) if level == "geometric" else 1) if sequence else 0.0
    return [mean] * len(sequence)


@pytest.mark.parametrize("layout", [padded, packed])
@pytest.mark.parametrize("beyond", ["truncate", "mask", "reject"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("low", "high"), [(0.8, 1.1), (0.5, math.inf)])
def test_importance_weights(layout, level, beyond, low, high):
    sequences = draw()
    p, q, *_, mask, ids = layout(sequences)
    found = corrections.importance_weights(
        p.requires_grad_(), q, mask=mask, level=level, beyond=beyond, min_ratio=low,
        max_ratio=high, sequence_ids=ids,
    )  # fmt: skip
    want, truncated = [], 0
    for sequence in logs(sequences):
        ratios = [math.exp(x) for x in by_level(sequence, level)]
        outside = [r < low or r > high for r in ratios]
        if beyond == "truncate":
            truncated += sum(outside)
            ratios = [min(max(r, low), high) for r in ratios]
        if beyond == "mask":
            ratios = [0.0 if out else r for r, out in zip(ratios, outside, strict=True)]
        if beyond == "reject" and any(outside):
            ratios = [0.0] * len(ratios)
        want.append(ratios)
    kinds = {"samples": 21 if level == "token" else 4, "sequence_level": level != "token"}
    check(found, mask, want, truncated=truncated, **kinds)


STATISTICS = {
    "error": lambda x: math.exp(abs(x)),
    "k1": lambda x: -x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.exp(x) - 1 - x,
}


@pytest.mark.parametrize("layout", [padded, packed])
@pytest.mark.parametrize("over", ["mean", "max"])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    ("statistic", "bound"), [("error", 1.7), ("k1", 0.05), ("k2", 0.16), ("k3", 0.2)]
)
def test_outliers_are_masked_by_sequence(layout, over, signed, statistic, bound):
    sequences = draw()
    p, q, _, a, mask, ids = layout(sequences)
    found = corrections.sequence_outlier_mask(
        p, q, mask=mask, statistic=statistic, bound=bound, over=over, sequence_ids=ids,
        advantages=a if signed else None,
    )  # fmt: skip
    want = []
    for sequence, x in zip(sequences, logs(sequences), strict=True):
        values = [STATISTICS[statistic](each) for each in x] or [0.0]
        out = (max(values) if over == "max" else sum(values) / len(values)) > bound
        if signed and not sequence[:, 3].sum() < 0:
            out = False
        want.append([0.0 if out else 1.0] * len(x))
    check(found, mask, want, samples=4, sequence_level=True)
    if not signed and over == "mean":
        assert 0 < found.masked < found.tokens


@pytest.mark.parametrize("layout", [padded, packed])
def test_masks_of_tokens(layout):
    sequences = draw()
    p, q, h, _, mask, _ = layout(sequences)
    scaled = corrections.entropy_scaled_mask(p, q, h, mask=mask, max_score=0.5, epsilon=0.01)
    want = [
        [float((p - q) ** 2 / (h + 0.01) <= 0.5) for p, q, h, _ in x.tolist()] for x in sequences
    ]
    check(scaled, mask, want, samples=21)
    moment = corrections.second_moment_mask(p, q, mask=mask, max_moment=0.05)
    kept = sorted(x * x for sequence in logs(sequences) for x in sequence)
    while kept and sum(kept) / len(kept) > 0.05:
        kept.pop()
    want = [[float(x * x <= kept[-1]) for x in sequence] for sequence in logs(sequences)]
    check(moment, mask, want, samples=21)
    assert min(scaled.masked, moment.masked) > 0
    assert max(scaled.masked, moment.masked) < 21


@pytest.mark.parametrize("layout", [padded, packed])
def test_masks_by_covariance(layout):
    sequences = draw()
    p, q, _, a, mask, _ = layout(sequences)
    tokens = [tuple(row) for x in sequences for row in x.tolist()]
    mean_p, mean_a = (sum(t[i] for t in tokens) / len(tokens) for i in (0, 3))
    covariances = [(t[3] - mean_a) * (t[0] - mean_p) for t in tokens]
    stopped = [
        (t[3] > 0 and math.exp(t[0] - t[1]) > 1.2) or (t[3] < 0 and math.exp(t[0] - t[1]) < 0.8)
        for t in tokens
    ]
    eligible = [0.05 < c < 0.9 and not s for c, s in zip(covariances, stopped, strict=True)]
    drawn = [
        corrections.clip_cov_mask(
            p, q, a, mask=mask, fraction=0.1, min_covariance=0.05, max_covariance=0.9,
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in range(20)
    ]  # fmt: skip
    dropped = torch.stack([x.weights[mask] == 0 for x in drawn])
    assert dropped.sum(1).tolist() == [2] * 20
    assert dropped.any(0).tolist() == eligible
    chosen = corrections.kl_cov_tokens(p, a, mask=mask, fraction=0.15)
    third = sorted(covariances)[-3]
    assert chosen[mask].tolist() == [c >= third for c in covariances]
    assert not chosen[~mask].any()


FUNCTIONS = {
    "token": lambda p, q, m, i: corrections.importance_weights(p, q, mask=m),
    "sequence": lambda p, q, m, i: corrections.importance_weights(
        p, q, mask=m, level="sequence", beyond="mask", max_ratio=math.inf, sequence_ids=i
    ),
    "geometric": lambda p, q, m, i: corrections.importance_weights(
        p, q, mask=m, level="geometric", beyond="reject", sequence_ids=i
    ),
    "outlier": lambda p, q, m, i: corrections.sequence_outlier_mask(
        p, q, mask=m, statistic="k3", bound=0.1, advantages=p, sequence_ids=i
    ),
    "entropy": lambda p, q, m, i: corrections.entropy_scaled_mask(
        p, q, p.abs(), mask=m, max_score=1.0, epsilon=0.1
    ),
    "moment": lambda p, q, m, i: corrections.second_moment_mask(p, q, mask=m),
    "covariance": lambda p, q, m, i: corrections.clip_cov_mask(p, q, p, mask=m),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_weights_are_finite_wherever_tokens_are_far_apart(name, dtype):
    p = torch.tensor([-1e4, -1.0, -1.0, -math.inf, -1.0, -1.0, -90.0, 5.0], dtype=dtype)
    q = torch.tensor([-1.0, -1e4, -math.inf, -1.0, -1.0, -90.0, -1.0, math.nan], dtype=dtype)
    mask = ~q.isnan()
    for ids in (torch.zeros(8, dtype=torch.long), torch.arange(8)):
        found = FUNCTIONS[name](p, q, mask, ids)
        assert found.weights.isfinite().all()
        assert found.weights[-1] == 0
        assert 0 <= found.ess <= found.samples
    empty = FUNCTIONS[name](p, q, torch.zeros_like(mask), torch.zeros(8, dtype=torch.long))
    assert (empty.tokens, empty.kept, empty.ess, empty.samples) == (0, 0, 0.0, 0)
    assert empty.weights.eq(0).all()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("whose", [0, 1])
def test_no_function_hides_a_log_probability_that_is_nan(name, whose):
    both = torch.tensor([[-1.0, -2.0, -1.0, -3.0], [-1.0, -2.0, -1.0, -9.0]])  # The last is far.
    both[whose, 1] = math.nan
    mask, ids = torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.long)
    found = FUNCTIONS[name](*both, mask, ids)
    assert found.weights[1].isnan()
    assert math.isnan(found.ess)
    assert found.tokens == found.kept + found.truncated + found.masked


X = -torch.rand(2, 3)
M = X < 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: f.importance_weights(X, X[0], mask=M), ShapeError, r"rollout_logprobs \[3\]"),
        (lambda f: f.importance_weights(X, X, mask=M, max_ratio=0.5), UsageError, r"0\.5"),
        (lambda f: f.importance_weights(X, X, mask=M, level="word"), UsageError, "'word'"),
        (lambda f: f.importance_weights(X, X, mask=M, beyond="drop"), UsageError, "'drop'"),
        (
            lambda f: f.importance_weights(X[0], X[0], mask=M[0], beyond="reject"),
            ShapeError,
            "Pass sequence_ids",
        ),
        (
            lambda f: f.sequence_outlier_mask(X, X, mask=M, statistic="k4", bound=1),
            UsageError,
            "'k4'",
        ),
        (
            lambda f: f.entropy_scaled_mask(X, X, X, mask=M, max_score=1, epsilon=0),
            UsageError,
            "epsilon",
        ),
        (lambda f: f.second_moment_mask(X, X, mask=M, max_moment=-1), UsageError, "-1"),
        (lambda f: f.kl_cov_tokens(X, X, mask=M, fraction=0), UsageError, "fraction"),
        (lambda f: f.group_advantages(X[0]), ShapeError, r"\[groups, members\]; got torch"),
        (lambda f: f.max_rl_advantages(X.long()), ShapeError, "got torch.int64"),
        (lambda f: f.group_advantages(X[:, :0]), ShapeError, r"\[2, 0\]"),
        (lambda f: f.group_advantages(X, mask=M[0]), ShapeError, r"mask .*\[2, 3\]"),
        (lambda f: f.turn_advantages(X, mask=M), ShapeError, r"\[groups, members, turns\]"),
        (lambda f: f.turn_advantages(X, mask=M, discount=2), UsageError, "discount"),
    ],
)
def test_what_means_nothing_is_refused(call, error, message):
    class Unchecked:
        def __getattr__(self, name):
            module = corrections if hasattr(corrections, name) else advantages
            return inspect.unwrap(getattr(module, name))

    with pytest.raises(error, match=message):
        call(Unchecked())


def test_advantages_of_a_group():
    rewards = torch.tensor(
        [[1, 0, 0.5, 0.5], [0.2, 0.2, 0.2, math.nan], [0, 0, 0, 0], [math.inf, 3, math.nan, 0]]
    ).double()
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 0, 0]], dtype=torch.bool)
    for row, kept in zip(rewards, mask, strict=True):
        own = row[kept].tolist()
        mean, n = sum(own) / len(own), len(own)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in own) / n)
        want = {
            advantages.group_advantages: [(r - mean) / (deviation + 1e-4) for r in own],
            advantages.leave_one_out_advantages: [
                r - (sum(own) - r) / (n - 1) if n > 1 else 0.0 for r in own
            ],
            advantages.max_rl_advantages: [(r - mean) / mean if mean else 0.0 for r in own],
        }
        for function, values in want.items():
            found = function(row[None], mask=kept[None])[0]
            assert found[kept].tolist() == pytest.approx(values, rel=1e-11, abs=1e-12)
            assert found[~kept].eq(0).all()
    plain = advantages.group_advantages(rewards[:1], normalise=False)
    assert plain[0].tolist() == [0.5, -0.5, 0.0, 0.0]
    assert advantages.group_advantages(rewards[:0]).shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("members", [1, 3, 7, 8])
@pytest.mark.parametrize("reward", [0.1, 12345.67, -1e30])
def test_equal_rewards_have_advantages_of_exactly_0(reward, members, dtype):
    rewards = torch.full((2, members), reward, dtype=dtype)
    present = torch.ones_like(rewards, dtype=torch.bool)
    present[1, 1:] = False
    turns = rewards[..., None].expand(2, members, 3)
    for found in (
        advantages.group_advantages(rewards),
        advantages.group_advantages(rewards, mask=present, normalise=False),
        advantages.leave_one_out_advantages(rewards, mask=present),
        advantages.max_rl_advantages(rewards),
        advantages.turn_advantages(turns, mask=torch.ones_like(turns, dtype=torch.bool)),
    ):
        assert found.dtype == dtype
        assert not found.any()


@pytest.mark.parametrize("rule", ["group", "leave_one_out", "max_rl"])
def test_advantages_are_found_in_float64_and_rounded_once(rule):
    rewards = torch.rand((64, 7), generator=torch.Generator().manual_seed(0)) * 1000
    rule = getattr(advantages, f"{rule}_advantages")
    assert torch.equal(rule(rewards), rule(rewards.double()).float())


def test_equal_advantages_vary_with_nothing():
    a, p = torch.full((3000,), 12345.67), torch.linspace(-20, 0, 3000)
    mask = torch.ones_like(a, dtype=torch.bool)
    found = corrections.clip_cov_mask(p, p, a, mask=mask, min_covariance=1e-4)
    assert found.masked == 0


@pytest.mark.parametrize("discount", [1.0, 0.5, 0.0])
def test_advantages_of_turns(discount):
    rewards = torch.tensor([[[0.0, 1.0, 2.0], [1.0, 0.0, math.nan], [0.5, math.inf, -math.inf]]])
    rewards = rewards.double()
    mask = torch.tensor([[[1, 1, 1], [1, 1, 0], [1, 0, 0]]], dtype=torch.bool)
    found = advantages.turn_advantages(rewards, mask=mask, discount=discount, normalise=False)
    after = [
        [discount**0 * 0 + discount + 2 * discount**2, 1 + 2 * discount, 2.0],
        [1.0, 0.0],
        [0.5],
    ]
    for turn in range(3):
        own = [x[turn] for x in after if len(x) > turn]
        want = [x - sum(own) / len(own) for x in own]
        assert found[0, : len(own), turn].tolist() == pytest.approx(want, abs=1e-12)
        assert found[0, len(own) :, turn].eq(0).all()


@pytest.mark.parametrize("layout", [padded, packed])
def test_metrics_of_a_batch_are_those_of_a_plain_loop(layout):
    p, q, _, _, mask, _ = layout(draw())
    found = corrections.off_policy_metrics(p, q, mask=mask)
    xs = [x for sequence in logs(draw()) for x in sequence]
    ws = [math.exp(x) for x in xs]
    want = {
        "ess": sum(ws) ** 2 / sum(w * w for w in ws) / len(ws),
        "k1": sum(-x for x in xs) / len(xs),
        "k2": sum(x * x / 2 for x in xs) / len(xs),
        "k3": sum(w - 1 - x for w, x in zip(ws, xs, strict=True)) / len(xs),
    }
    assert found == pytest.approx(want, rel=1e-12)
    on_policy = corrections.off_policy_metrics(p, p, mask=mask)
    assert on_policy == {"ess": 1.0, "k1": 0.0, "k2": 0.0, "k3": 0.0}
    nobody = corrections.off_policy_metrics(p, q, mask=torch.zeros_like(mask))
    assert nobody == on_policy
    huge = corrections.off_policy_metrics(p + 1e4, q, mask=mask)
    assert all(math.isfinite(value) for value in huge.values())


def _metrics_of_a_part():
    _one_rank_is_wrong()
    p, q, _, _, mask, _ = (x if x is None else x[dist.get_rank() :: 2] for x in padded(draw()))
    return corrections.off_policy_metrics(p, q, mask=mask, group=dist.group.WORLD)


def _one_rank_is_wrong():
    p, mask = -torch.rand(4 + dist.get_rank()), torch.ones(4, dtype=torch.bool)
    with pytest.raises((ShapeError, RankError)):
        corrections.off_policy_metrics(p, p[:4], mask=mask, group=dist.group.WORLD)


def test_metrics_of_all_ranks_are_those_of_the_whole():
    p, q, _, _, mask, _ = padded(draw())
    whole = corrections.off_policy_metrics(p, q, mask=mask)
    for found in ranks.run(_metrics_of_a_part):
        assert found == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_k3_has_its_digits_where_the_policies_are_close(direction):
    generator = torch.Generator().manual_seed(0)
    q = -torch.rand(99, generator=generator)
    p = q + 1e-3 * torch.rand(99, generator=generator).square()
    settings = {"mask": torch.tensor([True]), "estimator": "k3", "direction": direction}
    for own, other in zip(p.split(1), q.split(1), strict=True):
        found = kl_loss(own, other, **settings).sum.item()
        exact = kl_loss(own.double(), other.double(), **settings).sum.item()
        # A few roundings of the log-ratio. Those of 1 would be a thousand times larger.
        assert abs(found - exact) <= 4 * torch.finfo(torch.float32).eps * (own - other).abs().item()
