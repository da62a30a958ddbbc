"""Rules that choose by name."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import UsageError
from primeblocks.fp8.rules import Rule, choose, choose_weights

NAMES = [
    "embed",
    "layers.0.self_attn.q_proj",
    "layers.0.self_attn.k_proj",
    "layers.0.mlp.gate",
    "layers.0.mlp.gate_up_proj",
    "layers.0.mlp.shared_expert_gate",
    "lm_head",
]


@pytest.mark.parametrize(
    ("rule", "chosen"),
    [
        (r"self_attn\.[qk]_proj", NAMES[1:3]),
        (re.compile("SELF_ATTN", re.IGNORECASE), NAMES[1:3]),
        ("layers.0", NAMES[1:6]),
        (r"mlp\.gate$", NAMES[3:4]),
        (r"mlp\.gate\w*|lm_head", [*NAMES[3:5], "lm_head"]),
        (r"\w*gate$", [NAMES[3], NAMES[5]]),
        (".*", NAMES),
        (("",), NAMES),
        ("(?i)SELF_ATTN", NAMES[1:3]),
        (re.compile("self_attn # all of it", re.VERBOSE), NAMES[1:3]),
        (r"mlp\.gate$|mlp\.gate_up_proj", NAMES[3:5]),
    ],
)
def test_whole_words_are_named(rule, chosen):
    assert list(choose(NAMES, only=rule)) == chosen


@pytest.mark.parametrize(
    "rule", ["mlp.gate", "mlp.gate.", "gate", r"\w*gate", "_proj", "proj$", "head", "o"]
)
def test_what_is_found_by_accident_is_refused(rule):
    with pytest.raises(UsageError, match="is found inside"):
        choose(NAMES, only=rule)
    with pytest.raises(UsageError, match="exclude='.*' is found inside"):
        choose(NAMES, only=".*", exclude=rule)


def test_what_is_named_can_be_left_out():
    assert choose(NAMES, only="layers.0.mlp", exclude=r"mlp\.(gate|shared_expert_gate)$") == (
        "layers.0.mlp.gate_up_proj",
    )


@pytest.mark.parametrize("rule", ["", "[", "(", "no_such_layer", (), ["lm_head", "gate"]])
def test_what_is_no_rule_or_names_nothing_is_refused(rule):
    with pytest.raises(UsageError, match="only"):
        choose(NAMES, only=rule)
    with pytest.raises(UsageError, match="exclude"):
        choose(NAMES, only=".*", exclude=rule)


def test_rules_that_leave_nothing_are_refused():
    with pytest.raises(UsageError, match="names all linear layers that only='lm_head' names"):
        choose(NAMES, only="lm_head", exclude=".*")


WORD = st.text("ab_", min_size=1, max_size=3)
NAME = st.lists(WORD, min_size=1, max_size=3).map(".".join)


@given(NAME, NAME)
def test_a_rule_names_whole_words_only(rule, name):
    words, wanted = name.split("."), rule.split(".")
    starts = range(len(words) - len(wanted) + 1)
    named = any(words[start : start + len(wanted)] == wanted for start in starts)
    found = Rule("only", re.escape(rule))
    if named or rule not in name:
        assert found.names(name) is named
    else:
        with pytest.raises(UsageError, match="inside"):
            found.names(name)


def test_weights_are_named_by_what_convert_returned_or_by_their_modules():
    weights = [
        "layers.0.self_attn.q_proj.weight",
        "layers.0.mlp.gate.weight",
        "layers.0.mlp.experts.gate_up_proj",
        "layers.0.mlp.experts.gate_up_proj_bias",
        "lm_head.weight",
    ]
    names = ("layers.0.self_attn.q_proj", "layers.0.mlp.experts")
    assert choose_weights(weights, only=names) == (weights[0], weights[2])
    assert choose_weights(weights, only=list(names)) == (weights[0], weights[2])
    assert choose_weights(weights, only=r"layers\.0", exclude=r"gate$") == (weights[0], weights[2])
    assert choose_weights(weights, only=r"lm_head$") == (weights[4],)
    with pytest.raises(UsageError, match="matches none"):
        choose_weights(weights, only=("layers.0.self_attn.q",))
