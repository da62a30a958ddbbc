"""In every version of the example, what comes back from pages is what was predicted."""

import re
from pathlib import Path

import pytest

from tests.engine_job import run_job

ROOT = Path(__file__).parents[2]
PATIENT = ROOT / "tests" / "kvoffload" / "vllm" / "patience.py"
EXAMPLE = ROOT / "examples" / "kv_tiers_vllm.py"
PAGE, AGENTS, TURNS, PROMPT, TOOL, GENERATED = 32, 5, 4, 512, 96, 8


@pytest.mark.vllm
@pytest.mark.example
def test_turns_find_their_pages_and_versions_do_not_share_them():
    # With two processes, as usual: an engine in this process would hold the lock of our threads.
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": str(ROOT),
    }
    printed = run_job(PATIENT, str(EXAMPLE), environment=environment)
    table = re.findall(r"^ +(\d) +([\d,]+) +([\d,]+) +([\d,]+) .* (\d+) +(\d+)$", printed, re.M)
    rows = [[int(number.replace(",", "")) for number in row] for row in table]
    assert [row[0] for row in rows] == [1, 2]
    lengths = [PROMPT + turn * (GENERATED + TOOL) for turn in range(TURNS)]
    # The last token that was generated has no keys and values yet.
    whole = [(length + GENERATED - 1) // PAGE * PAGE for length in lengths[:-1]]
    for _, prompt, stored, alone, host, disk in rows:
        assert prompt == AGENTS * sum(lengths)
        assert stored == AGENTS * sum(whole)
        assert alone < stored / 4
        assert (host + disk) * PAGE == stored - alone
        assert min(host, disk) > 0
    assert re.search(r"^disk: .*checksum_failures 0, failures 0", printed, re.M)
    assert "the answers of both engines are equal" in printed
