"""Adapters as named tensors: PEFT's own names, what is refused, sharded trainers."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from primeblocks.errors import PlanError, ShapeError, UnsupportedError, UsageError
from primeblocks.testing import ranks, tiny_models
from primeblocks.weightsync import Publisher, Subscriber, describe, plan_sync
from primeblocks.weightsync.engines.lora import AdapterSpec, adapter_parameters
from primeblocks.weightsync.manifest import gather_manifests
from primeblocks.weightsync.transports import FileTransport
from tests.deadlines import HANG_S

NEEDS_PEFT = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
PREFIX = "base_model.model."
SPEC = AdapterSpec("policy", rank=2, alpha=4.0)


def tensors_of(modules, *, rank=2):
    tensors = {}
    for name, (inputs, outputs) in modules.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.zeros(rank, inputs)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.zeros(outputs, rank)
    return tensors


def peft_model(**settings):
    import peft

    base = tiny_models.build("qwen3", dtype="float32", num_layers=2, hidden=32)
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]} | settings
    return peft.get_peft_model(base, peft.LoraConfig(**settings))


PART = st.text("ab_", min_size=1, max_size=8)
SIZE = st.integers(1, 9)


@given(
    modules=st.dictionaries(
        st.lists(PART, min_size=1, max_size=3).map(".".join), st.tuples(SIZE, SIZE), min_size=1
    ),
    rank=st.integers(1, 5),
    data=st.data(),
)
def test_modules_reads_back_what_was_adapted_and_misses_nothing(modules, rank, data):
    tensors = tensors_of(modules, rank=rank)
    spec = AdapterSpec("x", rank=rank, alpha=1.0)
    assert spec.modules(describe(tensors)) == modules
    lost = data.draw(st.sampled_from(sorted(tensors)))
    del tensors[lost]
    with pytest.raises(PlanError, match="no lora_[AB]" if tensors else "no tensors"):
        spec.modules(describe(tensors))


@pytest.mark.parametrize("name", ["", "a@1", "a/b", "a b", ".a", "a\n"])
def test_names_that_a_version_could_not_follow(name):
    with pytest.raises(UsageError, match="an adapter's name may have only"):
        AdapterSpec(name, rank=1, alpha=1.0)


def test_a_rank_is_positive():
    with pytest.raises(UsageError, match="rank of 'a' must be positive; got 0"):
        AdapterSpec("a", rank=0, alpha=1.0)


@pytest.mark.parametrize(
    ("name", "shape", "kind", "message"),
    [
        (f"{PREFIX}a.lora_A.default.weight", (2, 3), PlanError, r"adapter_parameters\(\)"),
        ("a.lora_A.weight", (2, 3), PlanError, "is not base_model.model"),
        (f"{PREFIX}a.lora_embedding_A", (2, 3), PlanError, "is not base_model.model"),
        (f"{PREFIX}a.lora_magnitude_vector.weight", (3,), PlanError, "is not base_model.model"),
        (f"{PREFIX}a.lora_A.weight", (3, 3), ShapeError, r"\[3, 3\], expected \[2, inputs\]"),
        (f"{PREFIX}a.lora_A.weight", (2,), ShapeError, r"\[2\], expected \[2, inputs\]"),
        (f"{PREFIX}a.lora_B.weight", (2, 3), ShapeError, r"\[2, 3\], expected \[outputs, 2\]"),
        (f"{PREFIX}a.experts.lora_A.weight", (2, 3), UnsupportedError, "LoRA on experts"),
        (f"{PREFIX}a.experts.3.up.lora_A.weight", (2, 3), UnsupportedError, "LoRA on experts"),
    ],
)
def test_tensors_that_are_no_plain_adapter(name, shape, kind, message):
    tensors = tensors_of({"b": (3, 4)}) | {name: torch.zeros(shape)}
    with pytest.raises(kind, match=message):
        SPEC.modules(describe(tensors))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("bias", "lora_only"),
        ("rank_pattern", {"q_proj": 4}),
        ("alpha_pattern", {"q_proj": 4}),
        ("modules_to_save", ["lm_head"]),
        ("target_parameters", ["mlp.experts.down_proj"]),
        ("init_lora_weights", "pissa_niter_16"),
    ],
)
def test_settings_that_plain_lora_cannot_express(key, value):
    with pytest.raises(UnsupportedError, match=f"{key}=.*only plain LoRA"):
        AdapterSpec.from_peft("x", {"r": 2, "lora_alpha": 4, key: value})


def test_settings_that_lack_something_are_refused():
    with pytest.raises(UsageError, match="settings of 'x' lack \\['r', 'lora_alpha'\\]"):
        AdapterSpec.from_peft("x", {})


@NEEDS_PEFT
def test_settings_of_peft():
    import peft

    for init in (True, False, "gaussian", "orthogonal"):
        config = peft.LoraConfig(r=6, lora_alpha=3, use_rslora=True, init_lora_weights=init)
        assert AdapterSpec.from_peft("x", config.to_dict()) == AdapterSpec("x", 6, 3, True)


@NEEDS_PEFT
def test_names_and_tensors_are_those_that_peft_saves():
    import peft

    model = peft_model()
    ours = adapter_parameters(model)
    theirs = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    spec = AdapterSpec.from_peft("policy", model.peft_config["default"].to_dict())
    assert len(spec.modules(describe(ours))) == 4


@NEEDS_PEFT
def test_one_adapter_of_several():
    import peft

    model = peft_model()
    config = peft.LoraConfig(r=3, lora_alpha=3, target_modules=["o_proj"], use_dora=True)
    model.add_adapter("default2", config)
    assert len(adapter_parameters(model)) == 8
    with pytest.raises(UnsupportedError, match="lora_magnitude_vector.*not the A or the B"):
        adapter_parameters(model, adapter="default2")
    with pytest.raises(PlanError, match="no LoRA parameters of an adapter named 'fault2'"):
        adapter_parameters(model, adapter="fault2")


@NEEDS_PEFT
@pytest.mark.parametrize("wrap", [partial(torch.compile, backend="eager"), checkpoint_wrapper])
def test_names_come_without_wrappers(wrap):
    model = peft_model()
    plain = adapter_parameters(model)
    layers = model.base_model.model.model.layers
    layers[1] = wrap(layers[1])
    wrapped = adapter_parameters(model)
    assert wrapped.keys() == plain.keys()
    assert all(wrapped[name] is one for name, one in plain.items())


@NEEDS_PEFT
def test_heads_that_are_trained_along_are_refused():
    with pytest.raises(UnsupportedError, match="modules_to_save"):
        adapter_parameters(peft_model(modules_to_save=["lm_head"]))


def _sharded_adapter(path):
    torch.manual_seed(0)
    layer = nn.Module()
    for part, shape in (("lora_A", (6, 4)), ("lora_B", (4, 5))):
        setattr(layer, part, nn.ModuleDict({"default": nn.Linear(*shape, bias=False)}))
    model = nn.ModuleDict({"base_model": nn.ModuleDict({"model": nn.ModuleDict({"q": layer})})})
    whole = {name: tensor.detach().clone() for name, tensor in adapter_parameters(model).items()}
    fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    layer.unshard()
    sharded = adapter_parameters(model)
    assert all(isinstance(tensor, DTensor) for tensor in sharded.values())
    manifests = gather_manifests(describe(sharded))
    plan = plan_sync(manifests, manifests[0].whole(), bucket_bytes=64)
    assert AdapterSpec("x", rank=4, alpha=1.0).modules(plan.target) == {"q": (6, 5)}
    transport = FileTransport(path, owner=dist.get_rank() == 0)
    dist.barrier()
    receipt = Publisher(plan, sharded, transport).publish(1, timeout_s=HANG_S)
    got = {}
    with Subscriber(plan, lambda t: got.update((n, v.clone()) for n, v in t), transport) as reader:
        reader.receive(timeout_s=HANG_S)
    dist.barrier()
    assert receipt.bytes == sum(tensor.nbytes for tensor in whole.values())
    return all(torch.equal(got[name], whole[name]) for name in whole)


def test_a_sharded_adapter_arrives_whole(tmp_path):
    assert ranks.run(_sharded_adapter, str(tmp_path), world_size=3) == [True] * 3
