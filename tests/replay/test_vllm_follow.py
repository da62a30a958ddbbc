"""Routes of a real vLLM in float32 whose requests are preempted, aborted, run through a weight
update, or find their pages again without rows: every known row equals transformers' choice.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from primeblocks.replay import Routes, compare, measure_mismatch, record
from primeblocks.replay.adapters.transformers import routers
from primeblocks.replay.sampling import kept_logprobs, kept_tokens
from primeblocks.testing import tiny_models
from tests.engine_job import fork_job

JOB = Path(__file__).with_name("vllm_follow_job.py")
PAGE_TOKENS = 32

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("follow")
    for seed, name in enumerate(["exact", "exact-1"]):
        # One dense layer, three that route, sigmoid scores.
        tiny_models.save("glm4_moe", path / name, dtype="float32", init_std=0.08, seed=seed)
    return path


@pytest.fixture(scope="module")
def flight(folder: Path) -> Mapping[str, np.ndarray]:
    fork_job(JOB, "flight", str(folder))
    return dict(np.load(folder / "flight.npz"))


@pytest.fixture(scope="module")
def pages(folder: Path) -> Mapping[str, np.ndarray]:
    fork_job(JOB, "pages", str(folder))
    return dict(np.load(folder / "pages.npz"))


@pytest.fixture(scope="module")
def models(folder: Path) -> list[Any]:
    return [
        AutoModelForCausalLM.from_pretrained(
            folder / name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        for name in ("exact", "exact-1")
    ]


def requests(results: Mapping[str, np.ndarray], case: str) -> list[tuple[Any, int, Routes]]:
    count = sum(key.startswith(f"{case}/") for key in results) // 4
    assert count
    return [
        (
            results[f"{case}/{i}/tokens"],
            int(results[f"{case}/{i}/cached"]),
            Routes.unpack(results[f"{case}/{i}/routes"].tobytes()),
        )
        for i in range(count)
    ]


@torch.no_grad()
def recomputed(models: list[Any], tokens: np.ndarray, cut: int | None = None) -> Routes:
    """Choices of transformers; from `cut` on those of the next policy, over the old one's KV."""
    ids = torch.from_numpy(tokens)[None]
    with record(routers(models[0])) as tape:
        cache = models[0](input_ids=ids[:, :cut], use_cache=True).past_key_values
    if cut is None:
        return tape.routes
    with record(routers(models[1])) as newer:
        models[1](input_ids=ids[:, cut:], past_key_values=cache, use_cache=True)
    return Routes.join([tape.routes, newer.routes])


@pytest.mark.parametrize("case", ["preempted", "aborted", "continued"])
def test_disturbed_requests_have_all_their_rows(flight, models, case):
    if case == "preempted":
        assert flight["preemptions"] >= 3
    elif case == "aborted":
        assert set(flight["reasons"]) == {"abort"}
    for tokens, cached, routes in requests(flight, case):
        assert (cached > 0) == (case == "continued")
        assert routes.missing.nonzero()[0].tolist() == [len(tokens) - 1]
        assert compare(routes, recomputed(models, tokens)).overall == 1.0


def test_each_row_belongs_to_the_version_that_computed_it(flight, models):
    assert flight["spans"].tolist() == [2, 2, 2]
    for (tokens, _, routes), switch in zip(
        requests(flight, "mixed"), flight["switches"], strict=True
    ):
        # The first new token was sampled from the position before it.
        cut = 40 + int(switch) - 1
        assert 40 <= cut < len(tokens) - 10
        assert compare(routes, recomputed(models, tokens, cut)).overall == 1.0
        assert compare(routes, recomputed(models, tokens)).overall < 0.9


@pytest.mark.parametrize("case", ["cold", "warm", "flood", "forgotten", "known again", "reset"])
def test_pages_bring_their_rows_or_none(pages, models, case):
    """The engine that vLLM would have ended at the first page without rows answers on."""
    for tokens, cached, routes in requests(pages, case):
        agreement = compare(routes, recomputed(models, tokens))
        assert agreement.overall == 1.0
        missing = routes.missing.nonzero()[0]
        if case in {"forgotten", "reset"}:
            assert cached == 96
            assert missing.tolist() == [*range(96), len(tokens) - 1]
        elif case == "known again":
            assert cached == 64
            assert missing.tolist() == [*range(64), len(tokens) - 1]
        else:
            assert cached == (96 if case == "warm" else 0)
            assert missing.tolist() == [len(tokens) - 1]
        assert agreement.tokens == len(tokens) - len(missing)


def test_the_engine_is_alive_after_all_that(pages, models):
    for tokens, _, routes in requests(pages, "alive"):
        assert routes.missing.sum() == 1
        assert compare(routes, recomputed(models, tokens)).overall == 1.0


def test_prefill_and_decode_engines_make_one_whole(folder, models):
    """The decoding engine got the KV of three pages through a shared folder, and no rows."""
    fork_job(JOB, "hand_over", str(folder))
    results = dict(np.load(folder / "hand_over.npz"))
    pairs = zip(requests(results, "prefill"), requests(results, "decode"), strict=True)
    for (_, _, first), (tokens, cached, second) in pairs:
        assert cached == 96
        assert second.missing.nonzero()[0].tolist() == [*range(96), len(tokens) - 1]
        whole = first.with_missing(after=len(tokens) - first.tokens).fill(second)
        assert whole.missing.nonzero()[0].tolist() == [len(tokens) - 1]
        assert compare(whole, recomputed(models, tokens)).overall == 1.0


@torch.no_grad()
def test_the_trainer_reaches_the_distribution_that_was_sampled(pages, models):
    """Temperature 0.7, top-k 40, top-p 0.9: vLLM's processed log-probabilities."""
    ours, plain, theirs = [], [], []
    for index, (tokens, _, _) in enumerate(requests(pages, "nucleus")):
        ids = torch.from_numpy(tokens)
        logits = models[0](input_ids=ids[None], use_cache=False).logits[0, -9:-1]
        kept = kept_tokens(logits, temperature=0.7, top_k=40, top_p=0.9)
        assert 0 < kept.counts.min() <= kept.counts.max() <= 40
        ours.append(kept_logprobs(logits, ids[-8:], kept, temperature=0.7))
        plain.append(logits.log_softmax(-1).gather(-1, ids[-8:, None])[:, 0])
        theirs.append(torch.from_numpy(pages[f"nucleus/{index}/logprobs"]))
    theirs = torch.cat(theirs)
    same = measure_mismatch(trainer_logprobs=torch.cat(ours), rollout_logprobs=theirs)
    other = measure_mismatch(trainer_logprobs=torch.cat(plain), rollout_logprobs=theirs)
    assert same.k3 < 1e-10
    assert other.k3 > 0.1
