"""Every router of the installed transformers: what is supported, and weighs as its host does."""

import ast
import importlib
import inspect
import linecache
import textwrap
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from primeblocks.errors import UnsupportedError
from primeblocks.replay import Routes, compare, impose, record
from primeblocks.replay.adapters import transformers as adapter
from tests.replay.test_transformers_routers import FAMILIES

MODELS = Path(transformers.__file__).parent / "models"
# Beside the families that are run as whole models elsewhere.
SAME_FORWARD = {
    "axk1": "AXK1TopkRouter",
    "glm4v_moe": "Glm4vMoeTextTopkRouter",
    "glm5_next": "Glm5NextTextTopkRouter",
    "kimi_linear": "KimiLinearTopkRouter",
    "mellum": "MellumTopKRouter",
    "mimo_v2_flash": "MiMoV2FlashTopkRouter",
    "minimax_m3_vl": "MiniMaxM3VLTopKRouter",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerTextTopKRouter",
    "qwen3_omni_moe/talker": "Qwen3OmniMoeTalkerTextTopKRouter",
    "qwen3_omni_moe/text": "Qwen3OmniMoeTextTopKRouter",
    "qwen4_exp": "Qwen4ExpTextTopKRouter",
    "step3p7": "Step3p7TopKRouter",
}
TOKENS, HIDDEN, EXPERTS, TOP_K = 40, 32, 16, 3


def router_classes():
    """Family, name and forward of each class that is called a router; nothing is loaded."""
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        source = path.read_text()
        for node in ast.parse(source).body if "Router" in source else ():
            if isinstance(node, ast.ClassDef) and "router" in node.name.lower():
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "forward":
                        yield path.parent.name, node.name, ast.get_source_segment(source, method)


def same_code(source, other):
    """By the syntax tree: not the tokens that the adapter compares."""
    trees = [ast.parse(textwrap.dedent(text)).body[0] for text in (source, other)]
    bodies = [[s for s in tree.body if not _is_docstring(s)] for tree in trees]
    return ast.dump(ast.Module(bodies[0], [])) == ast.dump(ast.Module(bodies[1], []))


def _is_docstring(statement):
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def test_each_router_with_the_code_of_a_known_one_is_supported():
    found = list(router_classes())
    code = {name: source for _, name, source in found}
    known = {name: code[name] for name, _ in adapter._FORWARDS.values()}
    expected = {
        (family, name)
        for family, name, source in found
        if any(same_code(source, other) for other in known.values())
    }
    extra = {(family.split("/")[0], name) for family, name in SAME_FORWARD.items()}
    assert extra <= expected
    assert {family for family, _ in expected - extra} == set(FAMILIES)
    assert len(expected) == len(FAMILIES) + len(extra)


def build(family, dtype=torch.float32):
    """One router of a family, in a list of layers, its weights and its bias drawn at random."""
    name, family = SAME_FORWARD[family], family.split("/")[0]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kind = getattr(module, name)
    config = transformers.PreTrainedConfig(
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        routed_scaling_factor=1.5,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
    )
    router = kind(config).to(dtype)
    generator = torch.Generator().manual_seed(1)
    router.weight.data.normal_(0, 0.5, generator=generator)
    for buffer in router.buffers():
        buffer.normal_(0, 0.3, generator=generator)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"gate": router})])})
    return adapter.routers(model)[0]


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", SAME_FORWARD)
def test_its_own_choice_is_weighed_as_the_host_does(family, dtype, normalised):
    router = build(family, dtype)
    if hasattr(router.module, "norm_topk_prob"):
        router.module.norm_topk_prob = normalised
    assert (router.num_experts, router.top_k) == (EXPERTS, TOP_K)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    output = router.module(hidden)
    assert torch.equal(router.gates(output, output[2]), output[1])
    pull = torch.randn(TOKENS, TOP_K, generator=generator).to(output[1].dtype)
    (wanted,) = torch.autograd.grad(output[1], router.module.weight, pull, retain_graph=True)
    with record([router]) as tape:
        router.module(hidden)
    with impose([router], tape.routes):
        again = router.module(hidden)
    (found,) = torch.autograd.grad(again[1], router.module.weight, pull)
    assert all(torch.equal(a, b) for a, b in zip(again, output, strict=True))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("family", SAME_FORWARD)
def test_foreign_choices_are_followed(family):
    router = build(family)
    hidden = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))
    draws = torch.rand(TOKENS, 1, EXPERTS, generator=torch.Generator().manual_seed(3))
    routes = Routes.from_array(
        draws.topk(TOP_K).indices.numpy(), num_experts=EXPERTS, layer_ids=[0]
    )
    with impose([router], routes), record([router]) as tape:
        logits, gates, ids = router.module(hidden)
    assert compare(routes, tape.routes).same_order == 1
    scores = logits.double().sigmoid() if router.formula in SIGMOID else logits.double().softmax(-1)
    chosen = scores.gather(-1, ids)
    if router.formula is not adapter._softmax or router.module.norm_topk_prob:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    wanted = chosen * getattr(router.module, "routed_scaling_factor", 1.0)
    torch.testing.assert_close(gates.double(), wanted, rtol=1e-6, atol=1e-6)


SIGMOID = (adapter._sigmoid, adapter._plain_sigmoid)


def known_forward(self, hidden_states):
    # A comment, and another name.
    """And words about it."""
    router_logits = F.linear(hidden_states, self.weight, self.bias)
    router_top_value, router_indices = torch.topk(router_logits, self.top_k, dim=-1)
    router_scores = torch.nn.functional.softmax(
        router_top_value, dim=1, dtype=router_top_value.dtype
    )
    return router_logits, router_scores, router_indices


def other_forward(self, hidden_states):
    router_logits = F.linear(hidden_states, self.weight, self.bias)
    router_top_value, router_indices = torch.topk(router_logits, self.top_k, dim=-1)
    router_scores = torch.nn.functional.sigmoid(router_top_value)
    return router_logits, router_scores, router_indices


def guarded(self, hidden_states):
    router_logits = F.linear(hidden_states, self.weight, self.bias)
    if self.training:
        router_logits = router_logits * 2
        router_logits = router_logits + 1
    return router_logits


def outside(self, hidden_states):
    router_logits = F.linear(hidden_states, self.weight, self.bias)
    if self.training:
        router_logits = router_logits * 2
    router_logits = router_logits + 1
    return router_logits


def decorated(forward):
    @torch.no_grad()
    def wrapper(self, hidden_states):
        return forward(self, hidden_states)

    return wrapper


def test_code_is_compared_without_its_layout():
    (gpt_oss,) = (mark for mark, (name, _) in adapter._FORWARDS.items() if name.startswith("Gpt"))
    assert adapter._fingerprint(known_forward) == gpt_oss
    others = [other_forward, decorated(known_forward), len, eval("lambda self, x: x")]
    assert not {adapter._fingerprint(other) for other in others} & set(adapter._FORWARDS)
    assert adapter._fingerprint(guarded) != adapter._fingerprint(outside)
    wide = textwrap.dedent(inspect.getsource(guarded)).replace("    ", "  ")
    assert adapter._fingerprint(defined(wide)) == adapter._fingerprint(guarded)


def defined(source):
    """A function whose source `inspect` finds, as one of a file."""
    name, names = "<of a test>", {}
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), names)
    return names["guarded"]


def test_a_forward_that_is_a_lambda_is_of_no_known_router():
    names = {
        "forward": lambda self, x: x,
    }
    plain = type("Plain", (nn.Module,), names)
    with pytest.raises(SyntaxError):
        ast.parse(textwrap.dedent(inspect.getsource(plain.forward)))
    with pytest.raises(UnsupportedError, match="no module of Plain is a router"):
        adapter.routers(plain())


def test_a_router_of_other_code_is_refused():
    from transformers.models.hy_v3.modeling_hy_v3 import HYV3TopKRouter

    router = HYV3TopKRouter.__new__(HYV3TopKRouter)
    nn.Module.__init__(router)
    with pytest.raises(UnsupportedError, match="a HYV3TopKRouter, is not a router"):
        adapter.routers(nn.ModuleDict({"layers": nn.ModuleList([router])}))
    assert "router_scaling_factor" in inspect.getsource(HYV3TopKRouter.forward)
