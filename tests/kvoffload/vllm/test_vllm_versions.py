"""Ten weight updates of one real engine whose pages and routes lie in our tiers."""

import json
from pathlib import Path

import numpy as np
import pytest

from primeblocks.testing import tiny_models
from tests.engine_job import fork_job
from tests.kvoffload.vllm import vllm_versions_job as job

VERSIONS = 10
WHOLE = 96  # tokens in whole pages, of the prompt and of what the second turn finds
PAGES = job.ROLLOUTS * WHOLE // job.PAGE_TOKENS
CLOSE = 1e-5  # float32 log-probabilities, prefill in other batches


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("versions")
    for version in range(VERSIONS):
        path = folder / f"model-{version}"
        tiny_models.save("qwen3_moe", path, seed=version, dtype="float32", init_std=0.06)
    fork_job(Path(job.__file__), str(folder), str(VERSIONS))
    return json.loads((folder / "results.json").read_text())


def column(requests, name):
    return [request[name] for request in requests]


def are_equal(requests, others):
    return [
        one["tokens"] == other["tokens"]
        and one["routes"] == other["routes"]
        and np.allclose(one["logprobs"], other["logprobs"], rtol=0, atol=CLOSE)
        for one, other in zip(requests, others, strict=True)
    ]


@pytest.mark.vllm
@pytest.mark.parametrize("version", range(VERSIONS))
def test_pages_and_routes_of_a_version_come_back_and_no_others_do(results, version):
    found = results["versions"][version]
    assert column(found["cold"], "cached") == [0] * job.ROLLOUTS, "a page of old weights was found"
    assert column(found["warm"], "cached") == [WHOLE] * job.ROLLOUTS
    assert column(found["turn"], "cached") == [WHOLE] * job.ROLLOUTS
    for phase in ("cold", "warm", "turn"):
        assert column(found[phase], "missing_routes") == [0] * job.ROLLOUTS
    assert all(are_equal(found["warm"], found["cold"]))
    predicted = [PAGES, PAGES * job.PAGE_TOKENS]
    assert found["warm_hits"] == found["turn_hits"] == predicted


@pytest.mark.vllm
def test_weights_differ_enough_to_notice(results):
    for before, after in zip(results["versions"], results["versions"][1:], strict=False):
        assert not any(are_equal(before["cold"], after["cold"]))
    assert column(results["salted"], "cached") == [0] * job.ROLLOUTS
    assert min(column(results["unsalted"], "cached")) >= WHOLE
    assert not any(are_equal(results["unsalted"], results["salted"]))


@pytest.mark.vllm
def test_an_engine_without_tiers_says_the_same(results):
    assert all(are_equal(results["fresh"], results["versions"][-1]["cold"]))


@pytest.mark.vllm
def test_a_prompt_may_come_back_to_its_last_page(results):
    """Stock vLLM ends the engine here, if it captures routes."""
    first, again = results["whole"]
    assert column(again, "cached") == [job.WHOLE] * job.ROLLOUTS
    assert column(again, "missing_routes") == [0] * job.ROLLOUTS
    assert all(are_equal(first, again))


@pytest.mark.vllm
def test_the_disk_is_full_and_bounded(results):
    quota = job.DISK_PAGES * job.FRAME_BYTES
    used = column(results["versions"], "disk_bytes")
    assert max(each["pages"] for each in used) <= quota
    assert min(each["pages"] for each in used[2:]) > 0.95 * quota
    journal = 3 * job.DISK_PAGES * (61 + 128) + (64 << 10)  # with keys below 128 bytes
    assert max(sum(each.values()) for each in used) <= quota + journal
    disk = results["versions"][-1]["tiers"]["disk"]
    assert disk["evictions"] > 0
    assert disk["checksum_failures"] == disk["failures"] == 0
