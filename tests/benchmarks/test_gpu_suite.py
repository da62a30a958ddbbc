"""The GPU suite's runner: what one case does costs that case alone. And its table of cases."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import machine, page
from benchmarks.gpu.cases import CASES, PARTS, Case
from benchmarks.gpu.runner import run_cases
from benchmarks.harness import collect
from tests.engine_job import is_gone

ROOT = Path(__file__).parents[2]


def case(name, code, *, deadline_s=60.0, **more):
    return Case("fp8", name, ("-c", code), ("-c", code), deadline_s, **more)


def statuses(report):
    return {each["case"]: each["status"] for each in json.loads(report.read_text())["cases"]}


def run(cases, report, *, budget_s=120.0, dry=False):
    return run_cases(cases, report=report, head={}, dry=dry, budget_s=budget_s, tell=lambda _: None)


GREEDY = "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 30, 1 << 30)); bytearray(4 << 30)"
# Its child goes on, and holds what a device's memory would be.
HANGS = (
    "import subprocess, sys, time, pathlib;"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "pathlib.Path({path!r} + '.new').write_text(str(child.pid));"
    "pathlib.Path({path!r} + '.new').rename({path!r}); time.sleep(600)"
)


def test_a_crash_a_hang_and_too_little_memory_cost_a_case_each(tmp_path):
    report, child = tmp_path / "report.json", tmp_path / "child"
    done = run(
        [
            case("good", "import os; print('seen', os.getcwd() + '/here')"),
            case("crash", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
            case("raises", "raise ValueError('its reason')"),
            case("hangs", HANGS.format(path=str(child)), deadline_s=5.0),
            case("greedy", GREEDY),
            case("lacks", "", needs=("no_such_module",)),
            case("last", "print('still here')"),
        ],
        report,
    )
    assert statuses(report) == {
        "good": "passed",
        "crash": "failed",
        "raises": "failed",
        "hangs": "timed out",
        "greedy": "failed",
        "lacks": "skipped",
        "last": "passed",
    }
    why = {each.case: each.why for each in done}
    assert "SIGSEGV" in why["crash"]
    assert "its reason" in why["raises"]
    assert "MemoryError" in why["greedy"]
    assert why["lacks"] == "no_such_module not installed"
    assert why["good"] == "seen here\n"
    assert why["last"] == "still here\n"
    pid = int(child.read_text())
    assert is_gone(pid)


def test_what_is_done_is_in_the_report_while_the_rest_runs(tmp_path):
    report = tmp_path / "report.json"
    look = (
        f"import json, pathlib; t = pathlib.Path({str(report)!r}).read_text(); print(json.loads(t))"
    )
    timed = case("second", look, has_figures=True)
    first, second = run([case("first", ""), timed], report)
    assert first.status == second.status == "passed"
    assert "'case': 'first', 'status': 'passed'" in second.why


# Ends when the other has begun.
MEETS = "import pathlib, time; f = pathlib.Path({folder!r}); (f / {mine!r}).touch()\n"
MEETS += "while not (f / {other!r}).exists(): time.sleep(0.01)"


def test_tests_run_side_by_side_and_before_what_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    a, b = ({"folder": str(tmp_path), "mine": x, "other": y} for x, y in ("ab", "ba"))
    timed = (
        f"import pathlib; print(sorted(x.name for x in pathlib.Path({str(tmp_path)!r}).glob('?')))"
    )
    cases = [
        case("timed", timed, has_figures=True),
        *(case(each["mine"], MEETS.format(**each), deadline_s=120.0) for each in (a, b)),
    ]
    done = run(cases, tmp_path / "report.json", budget_s=300.0)
    assert [(each.case, each.status) for each in done] == [
        ("timed", "passed"), ("a", "passed"), ("b", "passed"),
    ]  # fmt: skip
    assert done[0].why == "['a', 'b']\n"


def test_a_run_ends_in_its_time(tmp_path):
    report = tmp_path / "report.json"
    slow = case("slow", "import time; time.sleep(600)")
    run([slow, case("late", "", has_figures=True)], report, budget_s=8.0)
    assert statuses(report) == {"slow": "timed out", "late": "skipped"}


def test_what_only_a_cpu_has_use_for_is_skipped_elsewhere(tmp_path):
    mine = Case("fp8", "mine", (), ("-c", "print('here')"))
    (there,), (here,) = (run([mine], tmp_path / "report.json", dry=dry) for dry in (False, True))
    assert (there.status, there.why) == ("skipped", "of use on a CPU alone")
    assert (here.status, here.why) == ("passed", "here\n")


def test_figures_come_with_their_case(tmp_path):
    write = 'import sys; open(sys.argv[2], \'w\').write(\'[{"figure": "a", "value": 2.0}]\')'
    (done,) = run([case("figures", write, has_figures=True)], tmp_path / "report.json")
    assert done.figures == ({"figure": "a", "value": 2.0},)


BENCHMARK = """
import os, sys
sys.path.insert(0, {root!r})
from benchmarks.harness import main
def rows():
    yield {{"a.first": (1.0, "s", "x")}}
    {then}
    yield {{"a.second": (2.0, "s", "x")}}
main(rows)
"""


@pytest.mark.parametrize("then", ["os.kill(os.getpid(), 9)", "raise SystemExit(3)"])
def test_rows_of_a_case_that_does_not_end_are_kept(tmp_path, then):
    code = BENCHMARK.format(root=str(ROOT), then=then)
    killed = case("killed", code, deadline_s=300.0, has_figures=True)
    (done,) = run([killed], tmp_path / "report.json", budget_s=300.0)
    assert done.status == "failed"
    assert [each["figure"] for each in done.figures] == ["a.first"]


def test_on_a_cpu_packages_of_no_gpu_machine_are_hidden(tmp_path):
    code = "import transformers, vllm.config"
    (hidden,) = run([case("hidden", code)], tmp_path / "report.json", dry=True)
    assert "No module named 'vllm'" in hidden.why


def test_every_case_names_code_that_exists():
    assert {each.part for each in CASES} == set(PARTS)
    assert len({each.name for each in CASES}) == len(CASES)
    for each in CASES:
        for arguments in (each.arguments, each.dry):
            if each.has_figures:
                assert importlib.util.find_spec(arguments[1]), arguments
                assert each.dry[2:] == ("--dry-run",)
            for word in arguments:
                assert not word.startswith("tests/") or (ROOT / word).exists(), word


def test_every_test_that_needs_a_device_is_in_a_case(request):
    """Of the tests that were collected with this one."""
    marked = {item.path for item in request.session.items if item.get_closest_marker("gpu")}
    files = {str(path.relative_to(ROOT)) for path in marked}
    chosen = {word for each in CASES for word in each.arguments if word.startswith("tests/")}
    # Skipped without one, and perhaps not marked.
    files |= {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__) and 'reason="needs a CUDA device"' in path.read_text()
    }
    assert files
    assert files <= chosen


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    "part",
    [
        *("async_loop_parts.logprobs_gpu", "dsa_parts.gpu", "fp8_parts.gpu"),
        *(f"weightsync_parts.{name}" for name in ("gpu", "gpu_colocated", "gpu_deltas")),
    ],
)
def test_a_benchmark_without_a_device_says_so(part):
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        collect(importlib.import_module(f"benchmarks.{part}").figures())


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"device": "cpu"}, "sees no CUDA device"),
        ({"device": "H", "free_bytes": 1 << 30}, "1 GiB of the device are free; 40 needed"),
        ({"device": "H", "free_bytes": 100 << 30}, ""),
    ],
)
def test_a_machine_that_cannot_measure_is_refused(said, why):
    assert why in machine.refusal(said)
    assert bool(machine.refusal(said)) is bool(why)


def test_the_page_is_drawn_from_the_results():
    assert page.PAGE.read_text() == page.draw()


def test_the_page_tells_what_ran_and_what_did_not(tmp_path):
    figure = {"figure": "a.tflops", "value": 700.0, "unit": "TFLOP/s", "peer": "x"}
    cases = [
        {"case": "fp8_kernels", "status": "passed", "seconds": 3.2, "why": "", "figures": [figure]},
        {"case": "dsa", "status": "failed", "seconds": 1.0, "why": "no\nroom", "figures": []},
    ]
    head = {
        "commit": "abc",
        "date": "2026-11-02",
        "machine": {"device": "H", "packages": {"torch": "2.11"}},
    }
    (tmp_path / "h.json").write_text(json.dumps(head | {"cases": cases}))
    older = head | {"commit": "old", "date": "2026-11-01"}
    before = [cases[0] | {"figures": [figure | {"value": 1.0}, figure | {"figure": "b"}]}]
    (tmp_path / "a.json").write_text(json.dumps(older | {"cases": before}))
    text = page.draw(tmp_path)
    assert "## H, abc\n\n| case | |\n|---|---|\n| packages | torch 2.11 |\n" in text
    assert "| fp8_kernels | passed, 3 s |" in text
    assert "| dsa | failed, 1 s: no room |" in text
    assert text.index("## H, abc") < text.index("## H, old")
    assert text.count("a.tflops") == 1
    assert "| `a.tflops` | 700 TFLOP/s | x | abc |" in text
    assert "| `b` | 700 TFLOP/s | x | old |" in text
    never = text.partition("## Never run on a GPU")[2]
    assert "`attention`" in never
    assert "`dsa`" not in never
