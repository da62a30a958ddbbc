"""The example as it is, and with a tenant that fails while the other goes on."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.engine_job import fork_job

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_adapters.py"
MISSING = [name for name in ("vllm", "peft") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.example,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
STEPS, ROLLOUTS = 30, 64  # ROLLOUTS are of a step


def run(folder, *arguments):
    before = set(Path("/dev/shm").glob("primeblocks-two-adapters-*"))
    printed = fork_job(EXAMPLE, "--out", str(folder), *arguments)
    assert set(Path("/dev/shm").glob("primeblocks-two-adapters-*")) <= before
    return printed, json.loads((folder / "summary.json").read_text())


def assert_versions_are_its_own(told):
    """Each trained token was sampled by this tenant's adapter, of the version that it names."""
    assert told["logprob_error"] < 1e-4  # float32, in other kernels.
    assert told["logprob_error_one_off"] > 0.01  # What a wrong label would show.
    assert told["rollouts_of_one_version"] == told["rollouts"] == told["steps"] * ROLLOUTS
    assert told["final_version"] == STEPS
    assert set(told["versions_trained"]) <= set(range(STEPS))
    assert len(told["versions_trained"]) > STEPS // 2
    assert told["max_staleness_seen"] <= 2


def assert_learned_its_own_task(summary):
    up, down = summary["tenants"]["up"], summary["tenants"]["down"]
    for told in (up, down):
        first, last = told["rewards"][:3], told["rewards"][-3:]
        assert sum(last) / 3 > sum(first) / 3 + 0.25
    assert all(0.3 < reward < 0.7 for reward in summary["base"].values())
    for told, own, other in ((up, "up", "down"), (down, "down", "up")):
        assert told["after"][own] > 0.75
        assert told["after"][other] < 0.25


def test_both_learn_and_neither_learns_the_other_task(tmp_path, full):
    if not full:
        pytest.skip("the run without a fault is the other one's first tenant: only with --full")
    _, summary = run(tmp_path)
    for told in summary["tenants"].values():
        assert told["error"] is None
        assert told["steps"] == STEPS
        assert_versions_are_its_own(told)
    assert_learned_its_own_task(summary)
    assert summary["untouched"]


@pytest.mark.parametrize(
    ("fault", "error"), [("generate", "ConnectionError"), ("train", "FloatingPointError")]
)
def test_a_tenant_that_fails_leaves_the_other_alone_and_comes_back(tmp_path, full, fault, error):
    """And neither learns the other's task."""
    if fault == "train" and not full:
        pytest.skip("runs under --full")
    printed, summary = run(tmp_path, "--fault", fault)
    (met,) = re.findall(r"'down' has failed \(up@(\d+), down@(\d+)\): (\w+)\(", printed)
    assert int(met[0]) < STEPS
    assert int(met[1]) in (10, 11)  # A step may be under way when rollouts fail.
    assert met[2] == error
    assert summary["versions_before_repair"]["up"] == STEPS
    assert summary["tenants"]["up"]["error"] is None
    assert summary["tenants"]["up"]["steps"] == STEPS
    assert summary["tenants"]["down"]["error"].startswith(f"{error}: the ")
    assert summary["tenants"]["down"]["steps"] in (STEPS - 1, STEPS)
    assert summary["untouched"]
    for told in summary["tenants"].values():
        assert_versions_are_its_own(told)
    assert_learned_its_own_task(summary)
