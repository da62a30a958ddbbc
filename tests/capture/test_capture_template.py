"""Prompts that go on with sampled ids, through a real byte-level BPE."""

import asyncio
import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from primeblocks.capture import Recorder
from primeblocks.capture.adapters.transformers import ChatTemplate
from primeblocks.capture.request import read_messages, read_request
from primeblocks.errors import UnsupportedError, UsageError
from tests.capture.chat_site import ADD, END, TEMPLATE, spelled, template, tokenizer

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
        '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
        r'<tool_call>{"name": "add", "arguments": {"a": "\ud83d"}}</tool_call>',
        '<tool_call>{"name": "add"',
    ):
        assert parse(wrong) == (wrong, [])
        assert parse(call + wrong) == (call + wrong, [])
    assert parse(call, calls=False) == (call, [])
    said = [("add", '{"a": 1, "é": [true]}')]
    for thought in (f"<think>{call}?</think>", "<think>in <tool_call> tags</think>", "a</think>"):
        assert parse(f"{thought}So:{call}") == (f"{thought}So:", said)
    assert parse(f"<think>{call}") == (f"<think>{call}", [])
    for tags in ("in <think> tags", "in </think> tags"):  # Not at the start: no thought.
        assert parse(f"{tags}{call}") == (tags, said)
    opens = TEMPLATE.replace(
        '<|im_start|>assistant\\n" }}{%- endif', '<|im_start|>assistant\\n<think>" }}{%- endif'
    )
    assert opens != TEMPLATE
    thinks = ChatTemplate(tokenizer(), chat_template=opens)
    assert thinks.parse(thinks.encode(call), calls=True) == (call, [])
    assert thinks.parse(thinks.encode(f"hm</think>{call}"), calls=True) == ("hm</think>", said)


def test_a_template_that_alters_an_answer_has_no_addition():
    strips = template(strip=True)
    thought = [{"role": "user", "content": "a"}]
    thought += [{"role": "assistant", "content": "<think>b</think>c"}]
    added = [{"role": "user", "content": "d"}]
    end = strips.stop_token_ids[0]
    assert strips.go_on(thought, added, [], last_id=end) is None
    plain = [thought[0], {"role": "assistant", "content": "c"}]
    assert strips.go_on(plain, added, [], last_id=end) is not None
    told = TEMPLATE.replace("and not loop.last", "")  # As DeepSeek's: of every answer.
    always = ChatTemplate(tokenizer(), chat_template=told, strip=True)
    assert always.go_on(thought, added, [], last_id=end) is None
    assert always.go_on(plain, added, [], last_id=end) is not None


def test_truncation_and_padding_of_other_calls_do_not_reach_prompts():
    trainers = copy.deepcopy(tokenizer())
    trainers.pad_token = END
    ours = ChatTemplate(trainers)
    messages = [{"role": "user", "content": "a b c d e f g h"}]
    whole = ours.render(messages, [])
    for options in ({"truncation": True, "max_length": 4}, {"max_length": 99}):
        trainers(["a", "a b c d e f"], padding="max_length", **options)
        assert ours.render(messages, []) == ChatTemplate(trainers).render(messages, []) == whole


def test_what_a_template_cannot_say_is_refused():
    with pytest.raises(UsageError, match="only the first message"):
        template().render([{"role": "user", "content": "a"}, {"role": "system", "content": ""}], [])
    bare = tokenizer()
    told = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    with pytest.raises(UnsupportedError, match="does not begin with an added token"):
        ChatTemplate(bare, chat_template=told)
    assert [*template().stop_token_ids[:1]] == template().encode(END)


async def _asked(renderer, answers, requests):
    """Ask one after the other, each with the last answer, and return the prompts and turns."""
    prompts = []

    async def engine(prompt, **_):
        prompts.append(list(prompt))
        ids, finish = answers.pop(0)
        return SimpleNamespace(
            token_ids=ids,
            logprobs=[-1.0] * len(ids),
            versions=np.zeros(len(ids), np.int64),
            finish_reason=finish,
            routed_experts=None,
        )

    async with Recorder(engine, renderer).session() as session:
        answer = None
        for request in requests:
            said = {"model": "m", **request(answer)}
            body = json.dumps(said).encode()
            answer = await session.ask(read_request(body, is_chat="messages" in said))
        return prompts, dict(session.conversation.counts)


def test_an_answer_that_is_sent_back_alone_keeps_its_ids():
    """As an agent does to let an answer go on that was cut, or to ask once more."""
    cut = ([*b"the quick"], "length")  # Bytes: ids that the tokenizer would not have made.
    asks = [{"role": "user", "content": "go"}]
    for requests in (
        [lambda _: {"prompt": "Once "}, lambda answer: {"prompt": "Once " + answer.content}],
        [lambda _: {"messages": asks}, lambda answer: {"messages": [*asks, answer.message()]}],
    ):
        prompts, counts = asyncio.run(_asked(template(), [cut, cut], requests))
        assert prompts[1][: len(prompts[0]) + 9] == prompts[0] + cut[0]
        assert counts == {"start": 1, "clean": 1}


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_tokenizer_that_begins_texts_with_a_space_reads_what_the_agent_wrote(scheme):
    """As those of Llama 2, Mistral and Phi-3."""
    letters = "abcdefghijklmnopqrstuvwxyz▁[]/"
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    made.add_tokens([AddedToken(each, special=True, normalized=False) for each in ("<s>", "</s>")])
    told = (
        "{% for m in messages %}{% if m.role == 'user' %}[i] {{ m.content }} [/i]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    own = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", chat_template=told
    )
    renderer = ChatTemplate(own)
    cats = own.convert_tokens_to_ids(["▁", "c", "a", "t", "s"])
    assert renderer.parse(cats, calls=False)[0] == " cats"
    answers = [(own.convert_tokens_to_ids(["c", "d"]), "length")] * 2
    requests = [lambda _: {"prompt": "ab"}, lambda answer: {"prompt": f"ab{answer.content}ef"}]
    prompts, _ = asyncio.run(_asked(renderer, answers, requests))
    assert own.decode(prompts[1]) == "abcdef"


@pytest.mark.parametrize(
    ("text", "given"), [('{"a": [1]}', {"a": [1]}), ("[1]", "[1]"), ("{", "{"), ("", "")]
)
def test_arguments_reach_a_template_as_an_object_if_they_are_one(text, given):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": text}}
    (message,) = read_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": given}
