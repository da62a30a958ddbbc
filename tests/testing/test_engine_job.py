"""A child that ends by a signal is named by it."""

import signal

import pytest

from primeblocks.errors import how_it_ended
from tests.engine_job import call, run_job


@pytest.mark.parametrize("number", [signal.SIGILL, signal.SIGSEGV, signal.SIGKILL])
def test_a_job_that_dies_by_a_signal_says_which(tmp_path, number):
    job = tmp_path / "job.py"
    job.write_text(f"import os; os.kill(os.getpid(), {int(number)})")
    with pytest.raises(AssertionError, match=rf"job\.py was ended by {number.name}"):
        run_job(job)


def test_a_job_that_raises_shows_its_traceback(tmp_path):
    job = tmp_path / "job.py"
    job.write_text("raise SystemExit('no luck')")
    with pytest.raises(AssertionError, match=r"(?s)job\.py exited with code 1.*no luck"):
        run_job(job)


@pytest.mark.parametrize(
    ("exitcode", "said"),
    [
        (0, "exited with code 0"),
        (132, "exited with code 132"),
        (-4, "was ended by SIGILL"),
        (-40, "was ended by signal 40"),  # real-time signals have numbers only
        (None, "goes on"),
    ],
)
def test_every_exit_status_has_words(exitcode, said):
    assert how_it_ended(exitcode) == said


def _fails():
    raise ValueError("no luck")


@pytest.mark.vllm
def test_a_body_returns_its_result_or_shows_its_traceback():
    assert call(divmod, 7, 2) == (3, 1)
    with pytest.raises(AssertionError, match=r"(?s)_fails exited with code 1.*no luck"):
        call(_fails)


def _holds(count):
    return len(b"x" * count)


@pytest.mark.vllm
def test_a_body_that_holds_too_much_memory_is_named():
    assert call(_holds, 1 << 20) == 1 << 20
    with pytest.raises(AssertionError, match=r"a process of _holds held 1\.\d GB; at most 1\.5 GB"):
        call(_holds, 1 << 30)
