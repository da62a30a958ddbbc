"""examples/plug_in runs against the real hosts, with the glue that docs/plug_in.md counts.

Here: a plain loop, transformers, accelerate and vLLM. Others: test_plug_in_peers.py.
"""

import os
import re
import subprocess
import sys

import pytest
import torch

from tests.deadlines import HANG_S, JOB_S
from tests.engine_job import run_job

from .plug_in import FOLDER, as_sent, example, naive_losses, received

ROOT = FOLDER.parents[1]
MOST_LINES = 25


def lines_of_glue(text):
    """Count what a user writes to plug us in: marked lines of code, and imports of ours."""
    within, count = False, 0
    for line in map(str.strip, text.splitlines()):
        if line in ("# glue", "# end of glue"):
            assert within == (line == "# end of glue"), "marks come in pairs"
            within = not within
        elif line.startswith(("import primeblocks", "from primeblocks")):
            count += "primeblocks.testing" not in line
        elif line and not line.startswith("#") and (within or line.endswith("# glue")):
            count += 1
    assert not within, "marks come in pairs"
    return count


def test_the_table_counts_the_glue():
    page = (ROOT / "docs" / "plug_in.md").read_text()
    rows = re.findall(r"^\|.*`(examples/\S+\.py)` \| (\d+) \| `(tests/\S+)`", page, re.MULTILINE)
    counted = {file: lines_of_glue((ROOT / file).read_text()) for file, _, _ in rows}
    assert {file: int(lines) for file, lines, _ in rows} == counted
    assert max(counted.values()) <= MOST_LINES
    glued = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "examples").rglob("*.py")
        if re.search(r"^# glue$", file.read_text(), re.MULTILINE)
    }
    assert glued <= counted.keys()
    for file, _, test in rows:
        assert file.rpartition("/")[2].removesuffix(".py") in (ROOT / test).read_text()


def test_the_count_leaves_out_what_is_no_glue():
    text = "import torch\nfrom primeblocks import losses\n# glue\n\n# why\na = 1\n# end of glue\nb"
    assert lines_of_glue(text) == 2
    assert lines_of_glue("x = f()  # glue\ny = 2") == 1
    with pytest.raises(AssertionError, match="pairs"):
        lines_of_glue("# glue\na = 1")


@pytest.fixture
def wanted(monkeypatch):
    tiny = example(monkeypatch, "tiny")
    found = naive_losses(tiny.model(), tiny.rollouts(), steps=5, lr=0.5)
    assert found[-1] < found[0] - 0.05
    return found


def near(wanted, *, printed=False):
    # Sums of a hundred terms in float32, whose errors five steps carry on.
    return pytest.approx(wanted, abs=6e-5 if printed else 1e-5)


def assert_published(name, version, model):
    held = received(name, version)
    weights = dict(model.named_parameters())
    assert held.keys() == weights.keys()
    for key, tensor in held.items():
        torch.testing.assert_close(tensor, as_sent(key, weights[key]), rtol=0, atol=0)


def test_plain_pytorch_loop(monkeypatch, wanted):
    loop = example(monkeypatch, "plain_pytorch")
    model, name = loop.tiny.model(), f"test-plain-{os.getpid()}"
    found = []
    for loss in loop.train(model, loop.tiny.rollouts(), name=name):
        found.append(loss)
        assert_published(name, len(found), model)
    assert found == near(wanted)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_transformers_trainer(monkeypatch, tmp_path, wanted, micro_batches):
    host = example(monkeypatch, "hf_trainer")
    monkeypatch.setattr(host, "NAME", f"test-hf-{micro_batches}-{os.getpid()}")
    trainer = host.build(str(tmp_path), micro_batches=micro_batches)
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert found == near(wanted)
    assert_published(host.NAME, 5, trainer.model)


def test_accelerate(monkeypatch, wanted):
    from accelerate import Accelerator

    loop = example(monkeypatch, "accelerate_loop")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=loop.MICRO_BATCHES)
    name = f"test-accelerate-{os.getpid()}"
    found = []
    for model, loss in loop.train(accelerator, name=name):
        found.append(loss)
        assert_published(name, len(found), model)
    assert found == near(wanted)


@pytest.mark.example
def test_accelerate_on_two_ranks(wanted):
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    done = subprocess.run(
        [sys.executable, *launch, str(FOLDER / "accelerate_loop.py")],
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = [float(loss) for loss in re.findall(r"^version \d: loss (\S+)", done.stdout, re.M)]
    assert found == near(wanted, printed=True)


@pytest.mark.vllm
@pytest.mark.example
def test_vllm_server_and_openai_client():
    printed = run_job(FOLDER / "vllm_serve.py", timeout_s=JOB_S)
    lines = re.findall(r"^versions {(\d)}: (\d+) rollouts, off by (\S+)", printed, re.M)
    assert [(version, count) for version, count, _ in lines] == [("1", "8"), ("2", "8")]
    # Weights move by 0.05 between versions, which moves log-probabilities by about 0.1.
    assert max(float(difference) for _, _, difference in lines) < 1e-4
