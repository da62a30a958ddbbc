"""Losses against plain loops in float64, however their tokens are laid out and split."""

import inspect
import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from primeblocks import losses
from primeblocks.errors import RankError, ShapeError, UsageError
from primeblocks.losses import distillation, normalisation
from primeblocks.testing import ranks

from .loss_formulas import KLS, SETTINGS, expected

ALL = SETTINGS | KLS
GARBAGE = (0.0, float("nan"), float("inf"), -float("inf"), 1e30)


def draw(seed, lengths):
    """Sequences of tokens (p, q, a, w), whose ratios are within a factor of three."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(length):
        x = torch.rand(length, 4, generator=generator, dtype=torch.float64)
        p = -0.05 - 2 * x[:, 0]
        return torch.stack([p, (p + 2 * x[:, 1] - 1).clamp(max=-0.01), 4 * x[:, 2] - 2, x[:, 3]], 1)

    return [tokens(length) for length in lengths]


def padded(sequences, garbage=0.0):
    """Operands of rows, a padding token before and at least one after each."""
    width = max(map(len, sequences), default=0) + 2
    rows = torch.full((len(sequences), width, 4), garbage, dtype=torch.float64)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        rows[row, 1 : len(sequence) + 1] = sequence
        mask[row, 1 : len(sequence) + 1] = True
    # One row may be a pack of several, so it says that it is not.
    ids = torch.zeros_like(mask, dtype=torch.long) if len(sequences) == 1 else None
    return (*rows.unbind(-1), mask, ids)


def packed(sequences, garbage=0.0):
    """Operands of one line, the last sequence first, with a masked token before each."""
    gap = torch.full((1, 4), garbage, dtype=torch.float64)
    parts = [torch.cat([gap, sequence]) for sequence in reversed(sequences)]
    line = torch.cat([torch.empty(0, 4, dtype=torch.float64), *parts])
    ids = [[7 * i - 3] * len(part) for i, part in enumerate(parts)]
    mask = [[False] + [True] * (len(part) - 1) for part in parts]
    return (
        *line.unbind(-1),
        torch.tensor([x for part in mask for x in part], dtype=torch.bool),
        torch.tensor([x for part in ids for x in part], dtype=torch.long),
    )


def evaluate(name, operands, **more):
    """The loss, and the gradient of its sum at every token."""
    loss, settings = ALL[name]
    p, q, a, w, mask, ids = operands
    p = p.clone().requires_grad_()
    arguments = (p, q) if loss == "kl_loss" else (p, q, a)
    settings = settings | {"weights": w} | more
    found = getattr(losses, loss)(*arguments, mask=mask, sequence_ids=ids, **settings)
    (gradient,) = torch.autograd.grad(found.sum, p, retain_graph=True)
    return found, gradient


def formula(name, sequences):
    """The sum, the gradients one after another, and how many tokens were clipped."""
    total, clipped, gradients = 0.0, 0, []
    for sequence in sequences:
        ps = [p.clone().requires_grad_() for p in sequence[:, 0]]
        tokens = [(p, *row) for p, row in zip(ps, sequence[:, 1:].tolist(), strict=True)]
        found = expected(*ALL[name], tokens)
        own = sum(x for x, _ in found) + sum(0 * p for p in ps)
        total += own.item() if ps else 0.0
        clipped += sum(stopped for _, stopped in found)
        gradients += torch.autograd.grad(own, ps) if ps else ()
    return total, [float(x) for x in gradients], clipped


@pytest.mark.parametrize("layout", [padded, packed])
@pytest.mark.parametrize("name", ALL)
def test_a_loss_is_its_formula(name, layout):
    sequences = draw(3, (5, 1, 0, 17))
    found, gradient = evaluate(name, layout(sequences, math.nan))
    if layout is packed:
        sequences = sequences[::-1]
    value, gradients, clipped = formula(name, sequences)
    mask = layout(draw(3, (5, 1, 0, 17)))[4]
    assert found.sum.item() == pytest.approx(value, rel=1e-12, abs=1e-12)
    assert gradient[mask].tolist() == pytest.approx(gradients, rel=1e-12, abs=1e-12)
    assert gradient[~mask].eq(0).all()
    assert (found.tokens, found.clipped, found.sequences) == (23, clipped, 3)
    if name in SETTINGS and name not in ("sapo", "dro", "unclipped"):
        assert 0 < clipped < 23


@given(
    name=st.sampled_from(sorted(ALL)),
    seed=st.integers(0, 99),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 5), max_size=2),
    by=st.sampled_from(["tokens", "sequences"]),
    garbage=st.sampled_from(GARBAGE),
)
def test_neither_packing_nor_micro_batches_change_a_loss(name, seed, lengths, cuts, by, garbage):
    sequences = draw(seed, lengths)
    whole, gradient = evaluate(name, padded(sequences))
    value = normalisation.divide(whole, by=by)
    count = whole.tokens if by == "tokens" else whole.sequences
    edges = sorted({0, len(lengths), *(min(cut, len(lengths)) for cut in cuts)})
    parts, gradients = [], []
    for start, end in itertools.pairwise(edges):
        some = sequences[start:end]
        layout = packed if start % 2 else padded
        part, own = evaluate(name, layout(some, garbage))
        own = own[layout(some)[4]].split([len(x) for x in (some[::-1] if start % 2 else some)])
        gradients += own[::-1] if start % 2 else own
        parts.append(part)
    apart = [normalisation.divide(part, by=count).item() for part in parts]
    assert normalisation.divide(*parts, by=by).item() == pytest.approx(value.item(), abs=1e-12)
    assert sum(apart) == pytest.approx(value.item(), abs=1e-12)
    flat = gradient[padded(sequences)[4]].tolist()
    assert torch.cat(gradients).tolist() == pytest.approx(flat, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", ["gspo", "gmpo", "grpo"])
def test_length_weights_make_means_of_sequences(name):
    sequences = draw(5, (4, 9, 2))
    for sequence in sequences:
        sequence[:, 2] = sequence[0, 2]  # One advantage a rollout, as in the papers.
        sequence[:, 3] = 1
    loss, settings = SETTINGS[name]
    want = 0.0
    for sequence in sequences:
        tokens = [
            (p, *row) for p, row in zip(sequence[:, 0], sequence[:, 1:].tolist(), strict=True)
        ]
        found = [x.item() for x, _ in expected(loss, settings, tokens)]
        want += sum(found) / len(found) / 3
    for layout in (padded, packed):
        *operands, mask, ids = layout(sequences, float("nan"))
        weights = normalisation.length_weights(mask, sequence_ids=ids)
        found, _ = evaluate(name, (*operands[:3], weights, mask, ids))
        assert normalisation.divide(found, by="sequences").item() == pytest.approx(want, rel=1e-12)


# A token's log-probabilities, the trainer's and the engine's, that are far apart or impossible.
FAR = [(-1e-3, -1e4), (-1e4, -1e-3), (-1.0, -90.0), (-1.0, -800.0), (0.0, -math.inf)]
FAR += [(-math.inf, -1.0), (-math.inf, -math.inf), (0.0, 0.0), (-1e-9, 0.0), (1e-7, -1e-9)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ALL)
def test_huge_ratios_give_finite_losses_and_gradients(name, dtype):
    rows = [(p, q, a) for p, q in FAR for a in (-1.5, 0.0, 2.0)]
    p, q, a = torch.tensor(rows, dtype=dtype)[:, :, None].unbind(1)
    mask = torch.ones_like(p, dtype=torch.bool)
    found, gradient = evaluate(name, (p, q, a, None, mask, None))
    assert found.sum.isfinite()
    assert found.sum.dtype == torch.promote_types(dtype, torch.float32)
    assert gradient.isfinite().all()
    # Far in the direction of its advantage a token has stopped, or its gradient is bounded.
    if name in ("grpo", "dual clip", "gspo"):
        assert gradient[2] == gradient[8] == gradient[11] == 0


@pytest.mark.parametrize("shape", [(3, 0), (2, 4), (0,)])
@pytest.mark.parametrize("name", ALL)
def test_nothing_to_learn_from_is_a_loss_of_0(name, shape):
    x = torch.full(shape, float("nan"), dtype=torch.float64)
    mask, ids = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.long)
    found, gradient = evaluate(name, (x, x, x, x, mask, ids))
    assert normalisation.divide(found).item() == normalisation.divide(found, by=0).item() == 0
    assert (found.tokens, found.clipped, found.sequences) == (0, 0, 0)
    assert gradient.eq(0).all()


@pytest.mark.parametrize("name", ALL)
def test_gradients_flow_to_the_trainer_alone(name):
    p, q, a, w, mask, ids = padded(draw(3, (5, 2)))
    want, gradient = evaluate(name, (p, q, a, w, mask, ids))
    rest = [x.clone().requires_grad_() for x in (q, a, w)]
    found, own = evaluate(name, (p, *rest, mask, ids))
    assert (found.sum.item(), own.tolist()) == (want.sum.item(), gradient.tolist())
    assert torch.autograd.grad(found.sum, rest, allow_unused=True) == (None,) * 3


# What a user meets: pytest alone checks annotations before.
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "aipo"])
def test_every_loss_looks_at_shapes(name):
    loss, settings = SETTINGS[name]
    x = -torch.rand(4, 4)
    with pytest.raises(ShapeError, match=r"advantages \[4\] .*expand_as"):
        inspect.unwrap(getattr(losses, loss))(x, x, x[0], mask=x < 0, **settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": lambda x: x[:, 0]}, r"advantages \[4\] .* \[4, 4\] .*expand_as.*repeat"),
        ({"rollout_logprobs": lambda x: x[0]}, r"rollout_logprobs \[4\]"),
        ({"rollout_logprobs": lambda x: x[..., None]}, r"rollout_logprobs \[4, 4, 1\]"),
        ({"advantages": lambda x: x.mean()}, r"advantages \[\]"),
        ({"mask": lambda x: x[0]}, r"mask \[4\]"),
        ({"mask": lambda x: x.double()}, r"mask must be bool; got torch.float64. Pass mask.bool"),
        ({"mask": lambda x: x.int()}, "mask must be bool; got torch.int32"),
        ({"mask": lambda x: None}, "mask must be a torch.Tensor; got NoneType"),
        ({"weights": lambda x: x[0]}, r"weights \[4\]"),
        ({"weights": lambda x: x > 0}, "weights must be floating; got torch.bool"),
        ({"sequence_ids": lambda x: x[0].long()}, r"sequence_ids \[4\]"),
        ({"sequence_ids": lambda x: x}, "sequence_ids must be integers; got torch.float64"),
        ({"advantages": lambda x: x.long()}, "advantages must be floating; got torch.int64"),
        ({"rollout_logprobs": lambda x: x.numpy()}, "must be a torch.Tensor; got ndarray"),
        ({"advantages": lambda x: x.to("meta")}, "advantages is on meta"),
    ],
)
def test_what_would_be_broadcast_is_refused(change, message):
    x = -torch.rand(4, 4, dtype=torch.float64)
    operands = {"rollout_logprobs": x, "advantages": x, "mask": x < -0.2}
    for changed, how in change.items():
        operands[changed] = how(operands.get(changed, x))
    with pytest.raises(ShapeError, match=message):
        inspect.unwrap(losses.grpo_loss)(x, **operands)


X = -torch.rand(2, 3)
KEPT = X < 0
UNCHECKED = inspect.unwrap(normalisation.divide)
UNCHECKED_TOP_K = inspect.unwrap(distillation.top_k_loss)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: losses.grpo_loss(X, X, X, mask=KEPT, clip_low=-0.1), "clip_low"),
        (lambda: losses.grpo_loss(X, X, X, mask=KEPT, clip_low=1.1), "clip_low"),
        (lambda: losses.cispo_loss(X, X, X, mask=KEPT, clip_high=math.nan), "clip_low"),
        (lambda: losses.gspo_loss(X, X, X, mask=KEPT, clip_high=-1), "clip_low"),
        (lambda: losses.gmpo_loss(X, X, X, mask=KEPT, clip_high=-1.0), "-1"),
        (lambda: losses.grpo_loss(X, X, X, mask=KEPT, max_ratio=0.5), r"0\.5"),
        (lambda: losses.aipo_loss(X, X, X, mask=KEPT, max_ratio=math.nan), "max_ratio"),
        (lambda: losses.sapo_loss(X, X, X, mask=KEPT, temperature_negative=0), "above 0"),
        (lambda: losses.dro_loss(X, X, X, mask=KEPT, beta=0), "beta"),
        (
            lambda: losses.dppo_loss(
                X, X, X, mask=KEPT, divergence="tv", max_low=math.nan, max_high=1
            ),
            "max_low",
        ),
        (lambda: losses.kl_loss(X, X, mask=KEPT, estimator="abs"), "does not estimate a KL"),
        (lambda: losses.gspo_loss(X[0], X[0], X[0], mask=KEPT[0]), "Pass sequence_ids"),
        (lambda: normalisation.length_weights(KEPT[0]), "Pass sequence_ids"),
        (normalisation.divide, "list of losses is empty"),
        (lambda: normalisation.divide(losses.TokenLoss(X.sum(), 1, 0), by=-1), "-1"),
        (lambda: normalisation.divide(losses.TokenLoss(X.sum(), 1, 0), by=0), "loss has tokens"),
        (lambda: UNCHECKED(losses.TokenLoss(X.sum(), 1, 0), by="token"), "'token'"),
        (
            lambda: normalisation.divide(losses.TokenLoss(X.sum(), 1, 0), by="sequences"),
            "Pass sequence_ids",
        ),
        (lambda: distillation.teacher_advantages(X, X, X, mask=KEPT), "2 teachers"),
        (lambda: UNCHECKED_TOP_K(X, X, mask=KEPT[:, 0], rest="all"), "'reverse' and 'all'"),
        (lambda: UNCHECKED_TOP_K(X, X, mask=KEPT[:, 0], direction="both"), "'both' and"),
    ],
)
def test_settings_that_mean_nothing_are_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call()


@pytest.mark.parametrize("count", [np.int64(4), np.array(4), torch.tensor(4), torch.tensor([4])])
def test_a_count_may_be_of_numpy_or_torch(count):
    loss = losses.grpo_loss(X, X, X, mask=KEPT)
    assert torch.equal(normalisation.divide(loss, by=count), loss.sum / 4)
    nothing = losses.grpo_loss(X, X, X, mask=~KEPT)
    assert normalisation.divide(nothing, by=count - 4) == 0
    assert type(normalisation.global_count(count)) is int


def _on_a_rank():
    """This rank's share of two losses, and of their gradients; the second has no sequence."""
    sequences = draw(11, (4, 0, 6, 3))
    own = {0: sequences[:1], 1: [], 2: sequences[1:]}[dist.get_rank()]
    loss, gradient = evaluate("gspo", padded(own))
    found = []
    for by in ("tokens", "sequences"):
        divided = normalisation.divide(loss, by=by, group=dist.group.WORLD)
        (slope,) = torch.autograd.grad(divided, loss.sum, retain_graph=True)
        found += [divided.item(), (slope * gradient.sum()).item()]
    refused = []
    own = "tokens" if dist.get_rank() else "sequences"
    blind = losses.TokenLoss(loss.sum, 1, 0, None if dist.get_rank() == 1 else 1)
    for losing, by in ((loss, own), (blind, "sequences")):
        with pytest.raises((UsageError, RankError)) as error:
            normalisation.divide(losing, by=by, group=dist.group.WORLD)
        refused.append(error.type.__name__)
    return found, refused


def test_ranks_add_up_to_the_whole():
    whole, gradient = evaluate("gspo", padded(draw(11, (4, 0, 6, 3))))
    both = [whole.sum.item(), gradient.sum().item()]
    want = [x / 13 for x in both] + [x / 3 for x in both]
    found = ranks.run(_on_a_rank, world_size=3)
    assert [sum(x) for x in zip(*(x for x, _ in found), strict=True)] == pytest.approx(want)
    assert [x for _, x in found] == [
        ["PlanError", "UsageError" if rank == 1 else "RankError"] for rank in range(3)
    ]


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_an_unbiased_kl_gradient_is_that_of_the_divergence(direction):
    """Over all words, each as often as the trainer samples it."""
    torch.manual_seed(2)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    of, to = (logprobs, reference) if direction == "reverse" else (reference, logprobs)
    divergence = (of.exp() * (of - to)).sum()
    (want,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    slopes = {}
    for estimator in ("k1", "k2", "k3"):
        for gradient in ("unbiased", "estimator"):
            loss = losses.kl_loss(
                logprobs,
                reference,
                mask=torch.ones(6, dtype=torch.bool),
                estimator=estimator,
                direction=direction,
                gradient=gradient,
                weights=logprobs.detach().exp(),
            ).sum
            (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
            slopes[estimator, gradient] = torch.allclose(found, want, rtol=1e-12, atol=1e-14)
            is_exact = loss.item() == pytest.approx(divergence.item(), rel=1e-12)
            assert is_exact == (estimator != "k2")
    right = {key for key, is_right in slopes.items() if is_right}
    also = {("k2", "estimator")} if direction == "reverse" else set()
    assert right == {(e, "unbiased") for e in ("k1", "k2", "k3")} | also


def test_teachers_are_advantages():
    student, teacher, other = (-torch.rand(2, 5, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    teacher[~mask], other[0] = math.nan, math.inf
    mine = torch.tensor([1.0, 0.25], dtype=torch.float64)[:, None].expand(2, 5)
    found = distillation.teacher_advantages(
        student, teacher, other, mask=mask, teacher_weights=[mine, 1 - mine]
    )
    for row, column in mask.nonzero().tolist():
        s, t, o = (float(x[row, column]) for x in (student, teacher, other))
        want = t - s if row == 0 else 0.25 * (t - s) + 0.75 * (o - s)
        assert float(found[row, column]) == pytest.approx(want, rel=1e-12)
    assert found[~mask].eq(0).all()


@pytest.mark.parametrize("rest", ["bucket", "renormalise"])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_students_top_words_are_a_distribution(direction, rest):
    torch.manual_seed(4)
    logits = torch.randn(3, 4, 9, dtype=torch.float64, requires_grad=True)
    few = logits.topk(3).indices
    student = logits.log_softmax(-1).gather(-1, few)
    teacher = torch.randn(3, 4, 9, dtype=torch.float64).log_softmax(-1).gather(-1, few)
    mask = torch.rand(3, 4) < 0.6
    with torch.no_grad():
        teacher[~mask] = math.nan
    want = 0.0
    for row, column in mask.nonzero().tolist():
        s, t = student[row, column].exp(), teacher[row, column].exp()
        if rest == "bucket":
            s, t = (torch.cat([x, 1 - x.sum()[None]]) for x in (s, t))
        s, t = s / s.sum(), t / t.sum()
        of, to = (s, t) if direction == "reverse" else (t, s)
        want = want + sum(of[i] * (of[i] / to[i]).log() for i in range(len(of)))
    (slope,) = torch.autograd.grad(want, logits, retain_graph=True)
    loss = distillation.top_k_loss(student, teacher, mask=mask, direction=direction, rest=rest)
    (found,) = torch.autograd.grad(loss.sum, logits)
    assert loss.sum.item() == pytest.approx(want.item(), rel=1e-12)
    assert torch.allclose(found, slope, rtol=1e-11, atol=1e-13)
    assert (loss.tokens, loss.sequences) == (int(mask.sum()), int(mask.any(1).sum()))
    sure = torch.tensor([[0.0, -math.inf]])
    for x, y in ((sure, sure), (sure, sure.flip(-1)), (sure.expm1(), sure)):
        own = x.clone().requires_grad_()
        edge = distillation.top_k_loss(own, y, mask=KEPT[0, :1], direction=direction, rest=rest).sum
        edge.backward()
        assert edge.isfinite()
        assert own.grad.isfinite().all()
