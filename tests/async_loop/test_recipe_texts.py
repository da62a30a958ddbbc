"""Texts and values that a command line cannot take, or would take for something else."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.async_loop.recipes import MODELS, replicas
from primeblocks.async_loop.recipes.arguments import arguments_of
from primeblocks.errors import PlanError

QWEN = MODELS["Qwen3-30B-A3B"]


@pytest.mark.parametrize("value", ["--enable-lora", "--port=1", "-O3", "a\0b"])
@pytest.mark.parametrize(
    "settings", [lambda x: {"a": x}, lambda x: {"a": ["b", x]}, lambda x: [f"--a={x}"]]
)
def test_a_value_that_vllm_would_read_as_a_flag_is_refused(settings, value):
    with pytest.raises(PlanError, match="would not be read as its value"):
        arguments_of(settings(value))


@pytest.mark.parametrize("settings", [["--"], ["--a b"], ["--=1"], ["--\n"], {"a b": 1}, {"": 1}])
def test_what_is_no_flag_is_refused(settings):
    with pytest.raises(PlanError, match="expected a flag"):
        arguments_of(settings)


def test_what_cannot_be_written_out_is_refused():
    endless = {}
    endless["a"] = endless
    for value in (10**5000, {"a": {1}}, {"a": 10**5000}, endless):
        with pytest.raises(PlanError, match="cannot be written out"):
            arguments_of({"a": value})


@given(st.text(min_size=1).map(lambda text: "x" + text))
def test_a_shell_reads_each_text_as_one_word(text):
    try:
        (process,) = replicas(QWEN).merge({"a": text}, environment={"B": text}).processes
    except PlanError:
        assert "\0" in text
        return
    visible, variable, *words = shlex.split(process.command())
    assert (visible, variable) == ("CUDA_VISIBLE_DEVICES=0", f"B={text}")
    assert words == process.words() == [*replicas(QWEN).processes[0].words(), "--a", text]
