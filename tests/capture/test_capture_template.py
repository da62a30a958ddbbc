"""Prompts that go on with sampled ids, through a real byte-level BPE."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.capture.adapters.transformers import ChatTemplate
from primeblocks.capture.request import read_messages
from primeblocks.errors import UnsupportedError, UsageError
from tests.capture.chat_site import ADD, END, spelled, template, tokenizer

WORDS = st.text(st.sampled_from("ab cdé\n.12日🤔'\" <>/{}\t"), max_size=30)
CALLS = st.lists(st.dictionaries(WORDS, st.integers(-9, 99), max_size=2), max_size=2)


def answer(text, arguments):
    """Return what a model writes, and the message that an agent sends back."""
    calls = [json.dumps({"name": "add", "arguments": each}) for each in arguments]
    said = text + "".join(f"\n<tool_call>\n{each}\n</tool_call>" for each in calls)
    content, found = template().parse(template().encode(said), calls=True)
    made = [
        {"id": f"t{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(found)
    ]
    return said, {"role": "assistant", "content": content, "tool_calls": made}


@given(
    turns=st.lists(st.tuples(WORDS, WORDS, CALLS, st.booleans()), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_sampled_ids_stay_and_the_text_is_the_templates(turns, seed):
    rng, held, messages = np.random.default_rng(seed), [], []
    for said, text, arguments, is_cut in turns:
        before = len(messages)
        messages.append({"role": "user", "content": said})
        if not before:
            prompt = template().render(messages, [ADD])
        else:
            added = template().go_on(messages[:before], messages[before:], [ADD], last_id=held[-1])
            prompt = held + added
            # The text behind the answer has the ids that it has in the whole.
            whole = template().render(messages, [ADD])
            cut = held[-1] != template().stop_token_ids[0]
            assert whole[-len(added) :] == added
            assert added[0] == template().stop_token_ids[0] or not cut
        assert prompt[: len(held)] == held
        written, message = answer(text, arguments)
        ids = spelled(written, rng)
        held = prompt + ids + ([] if is_cut and ids else [template().stop_token_ids[0]])
        messages += read_messages([message])


def test_calls_are_read_and_all_else_is_text():
    def parse(text, calls=True):
        return template().parse(template().encode(text), calls=calls)

    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "é": [true]}}\n</tool_call>'
    assert parse(f"So:\n{call}") == ("So:", [("add", '{"a": 1, "é": [true]}')])
    assert parse(call + call)[1] == [("add", '{"a": 1, "é": [true]}')] * 2
    for wrong in (
        "<tool_call>{</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "a"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add"',
    ):
        assert parse(wrong) == (wrong, [])
        assert parse(call + wrong) == (call + wrong, [])
    assert parse(call, calls=False) == (call, [])


def test_a_template_that_alters_an_answer_has_no_addition():
    strips = template(strip=True)
    thought = [{"role": "user", "content": "a"}]
    thought += [{"role": "assistant", "content": "<think>b</think>c"}]
    added = [{"role": "user", "content": "d"}]
    end = strips.stop_token_ids[0]
    assert strips.go_on(thought, added, [], last_id=end) is None
    plain = [thought[0], {"role": "assistant", "content": "c"}]
    assert strips.go_on(plain, added, [], last_id=end) is not None


def test_what_a_template_cannot_say_is_refused():
    with pytest.raises(UsageError, match="only the first message"):
        template().render([{"role": "user", "content": "a"}, {"role": "system", "content": ""}], [])
    bare = tokenizer()
    told = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    with pytest.raises(UnsupportedError, match="does not begin with an added token"):
        ChatTemplate(bare, chat_template=told)
    assert [*template().stop_token_ids[:1]] == template().encode(END)
