"""Recorded loads of vLLM's own loaders, held to what they write: from where, and where to."""

import gc
import logging
import multiprocessing
import os
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from primeblocks.testing import tiny_models
from primeblocks.weightsync import describe, plan_sync
from primeblocks.weightsync.adapters.vllm.loads import casts_untold, record_load
from primeblocks.weightsync.convert.conversion import record_reads
from primeblocks.weightsync.manifest import NEVER_ROUNDED
from tests.deadlines import START_S
from tests.engine_job import call
from tests.weightsync.toy_engine import moved
from tests.weightsync.vllm_site import error_of, needs

pytestmark = needs("vllm")

RANKS = 2
SIZES = {"num_layers": 2, "hidden": 128, "num_experts": 4, "top_k": 1, "vocab": 72}
# Families whose loaders differ, and whether ranks have experts whole.
FEW = {"glm4_moe": True}
MORE = {"gpt_oss": False, "mixtral": True, "deepseek_v3": True, "llama": False}


@pytest.fixture(scope="module")
def loads(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reads")
    families = FEW | (MORE if request.config.getoption("--full") else {})
    for family in families:
        tiny_models.save(family, folder / family, **SIZES)
    return call(_load_on_ranks, folder, families)


def _load_on_ranks(folder, families):
    seen = {}
    for family, whole_experts in families.items():
        with multiprocessing.get_context("fork").Pool(RANKS) as pool:
            tasks = [(folder, family, whole_experts, rank) for rank in range(RANKS)]
            seen[family] = pool.starmap_async(_load, tasks, chunksize=1).get(START_S)
        for left in Path("/dev/shm").glob(f"{family}-{os.getpid()}-*"):  # by vLLM
            left.unlink()
    return seen


def _load(folder, family, whole_experts, rank):
    """Bytes that a rank reads, of its parameters, and of all; what was lost; what then differs."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

    checkpoint = load_file(folder / family / "model.safetensors")
    config = EngineArgs(
        str(folder / family),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
        skip_tokenizer_init=True,
        tensor_parallel_size=RANKS,
        enable_expert_parallel=whole_experts,
    ).create_engine_config()
    os.environ["VLLM_DIST_IDENT"] = f"{family}-{os.getppid()}"  # of memory that ranks share
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        init_worker_distributed_environment(config, rank, f"file://{folder}/{family}.meet", rank)
        model = initialize_model(config)
        held = dict(model.named_parameters())
        reads = record_reads(model.load_weights, describe(checkpoint), into=held)
        loaded = []
        for tensors in (checkpoint, _poisoned(checkpoint, reads.boxes)):
            for parameter in held.values():
                parameter.data.fill_(7)
            # Copies: loaders may write to what they are given.
            model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
            loaded.append({name: parameter.data.clone() for name, parameter in held.items()})
    whole, boxes = loaded
    sizes = [sum(t.nbytes for t in each.values()) for each in (whole, checkpoint)]
    differ = [name for name in whole if not torch.equal(whole[name], boxes[name])]
    made = moved(reads.into, checkpoint)
    elsewhere = [
        name
        for name, loaded in whole.items()
        for piece in reads.into.by_target.get(name, ())
        if not torch.equal(*(t[piece.target_box.slices] for t in (loaded, made[name].to(loaded))))
    ]
    # No weight of these models is 7.
    counts = {name: int((loaded != 7).sum()) for name, loaded in whole.items()}
    miscounted = [name for name in whole if reads.written.get(name) != counts[name]]
    unknown = [name for name in whole if name not in made]
    arrives = {name for name, pieces in reads.into.by_source.items() if pieces}
    rounded = [  # On the way, though the engine has more digits.
        piece.source
        for name, parameter in held.items()
        for piece in reads.into.by_target.get(name, ())
        if parameter.dtype == torch.float32 and not piece.source.endswith(NEVER_ROUNDED)
    ]
    lost = {name: why for name, why in reads.lost.items() if name not in arrives}
    unplaced = [name for name in reads.boxes if name not in arrives | set(lost)]
    read = plan_sync([describe(checkpoint)], reads).bytes_total
    return (
        read,
        *sizes,
        dict(reads.inexact),
        lost,
        [differ, elsewhere, miscounted, unknown, unplaced, rounded],
    )


def _poisoned(checkpoint, boxes):
    """Tensors that are NaN outside of boxes."""
    poisoned = {name: torch.full_like(tensor, torch.nan) for name, tensor in checkpoint.items()}
    for name, each in boxes.items():
        for box in each:
            poisoned[name][box.slices] = checkpoint[name][box.slices]
    return poisoned


def test_what_is_recorded_is_what_the_loader_does(loads):
    for family, ranks in loads.items():
        for rank, (read, parameters, everything, inexact, lost, wrong) in enumerate(ranks):
            assert not any(wrong), (family, wrong)
            assert not inexact, family
            # Of what all ranks would add, one has the values and the others zeros.
            bias = family == "gpt_oss" and rank == 1
            assert set(lost.values()) == ({"it is computed with"} if bias else set()), family
            assert all("down_proj_bias" in name for name in lost)
            assert read <= 1.05 * parameters < 0.7 * everything, family


def test_a_layer_with_two_names_and_the_scales_of_its_kernel_is_recorded():
    """As shared experts in float8: vLLM makes the scales after it has loaded the weights."""
    lacking, devices, *_ = call(_shared)
    assert lacking == []
    assert devices == {"layer.weight": "cpu", "layer.weight_scale": "cpu"}


def test_an_update_need_not_have_the_scales_that_vllm_computes():
    *_, held, error, missing = call(_shared)
    assert held == {"layer.weight": 6.0, "layer.weight_scale": 2.0}
    assert error == "TransferError"
    assert "2 parameters would keep their old values, such as experts.layer.weight." in missing


def _shared():
    from vllm.config import VllmConfig
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.utils import replace_parameter

    class Scales(_method()):
        def process_weights_after_loading(self, layer):
            scale = layer.weight.data[0, 0] - 4
            replace_parameter(layer, "weight", layer.weight.data.half())
            replace_parameter(layer, "weight_scale", scale.reshape(1))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.experts = nn.Linear(4, 4, bias=False), nn.Module()
            self.experts.layer = self.layer  # The second name.
            self.layer.quant_method = Scales()
            self.layer.weight.weight_loader = lambda param, loaded_weight: param.data.copy_(
                loaded_weight
            )

        def load_weights(self, tensors):
            for _, tensor in (rows := list(tensors)):
                self.layer.weight.weight_loader(self.layer.weight, tensor)
            return {name for name, _ in rows}

    model = Model()
    layerwise.record_metadata_for_reloading(model)
    model.layer.quant_method.process_weights_after_loading(model.layer)
    config = VllmConfig()
    config.model_config = SimpleNamespace(quantization="fp8")
    checkpoint = describe({"layer.weight": torch.zeros(4, 4)}).whole()
    lacking = record_load(model, checkpoint, config).lacking
    devices = {name: one.device.type for name, one in model.named_parameters()}
    engine = _engine_of(model, quantization="fp8")
    engine._load([("layer.weight", torch.full((4, 4), 6.0))])
    held = {name: one.max().item() for name, one in model.named_parameters()}
    return lacking, devices, held, *error_of(engine._load, [])


def test_a_cast_of_what_is_not_rounded_is_no_warning():
    told = call(_told)
    assert told == ["mlp.gate_up_proj.weight"]


def _told():
    """Names of what vLLM warns of, that are loaded in float32 into bfloat16."""
    from vllm.model_executor.models.utils import AutoWeightsLoader

    names = ["mlp.gate.weight", "mlp.gate_up_proj.weight"]
    model, told = nn.Module(), []
    model.mlp = nn.ModuleDict(
        {name.split(".")[1]: nn.Linear(4, 4, bias=False, dtype=torch.bfloat16) for name in names}
    )
    log = logging.getLogger("vllm.model_executor.models.utils")
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.args[0])
    log.addHandler(handler)
    with casts_untold():
        AutoWeightsLoader(model).load_weights((name, torch.ones(4, 4)) for name in names)
    return told


def test_an_error_at_the_end_of_a_load_leaves_nothing_of_it_to_the_next():
    errors, first, second = call(_fails_at_its_end)
    assert errors == [None, "MemoryError", None]
    assert first == [1.0, 1.0]  # No layer is without memory.
    assert second == [3.0, 3.0]


class _Padded(nn.Module):
    """A layer of four rows, three of which are in the checkpoint, so vLLM processes it late."""

    def __init__(self, method):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.weight.weight_loader = lambda param, row, at: param.data[at].copy_(row)
        self.quant_method = method


class _TwoLayers(nn.Module):
    def __init__(self, method):
        super().__init__()
        self.a, self.b = _Padded(method), _Padded(method)

    def load_weights(self, tensors):
        parameters = dict(self.named_parameters())
        for name, rows in tensors:
            for at, row in enumerate(rows):
                parameters[name].weight_loader(parameters[name], row, at)
        return {*parameters}

    def rows(self):
        return [one[0, 0].item() for one in self.parameters()]


def _fails_at_its_end():
    """Errors of three loads, and what layers hold after the second and the third."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    class Method(_method()):
        is_full = False

        def process_weights_after_loading(self, layer):
            if self.is_full:
                self.is_full = False
                raise MemoryError

    method = Method()
    model = _TwoLayers(method)
    record_metadata_for_reloading(model)
    engine = _engine_of(model)
    errors, held = [], []
    for version in (1.0, 2.0, 3.0):
        method.is_full = version == 2.0
        try:
            engine._load((f"{name}.weight", torch.full((3, 3), version)) for name in "ab")
            errors.append(None)
        except MemoryError as error:
            errors.append(type(error).__name__)
        held.append(model.rows())
    return errors, held[1], held[2]


@pytest.mark.parametrize("kept", [True, False])
def test_graphs_read_the_tensors_of_the_first_kernel_after_a_sleep_and_an_update(kept):
    assert call(_captured, "block", kept) == ("", [7.0, 7.0] if kept else None)


def test_scales_of_graphs_that_an_update_would_leave_as_they_were_are_refused():
    for scales, (captured, eager) in call(_refusals).items():
        assert "CUDA graphs would read old scales of Experts" in captured, scales
        assert "enforce_eager=True" in captured
        assert eager == "", scales


def _refusals():
    kinds = ("nvfp4", "mxfp4", "inverted")
    return {scales: [_captured(scales, graphs)[0] for graphs in (True, False)] for scales in kinds}


def _captured(scales, graphs):
    """The error of an attach, and what the first kernel then holds, if it is alive."""
    from vllm.config import CUDAGraphMode
    from vllm.model_executor.layers.fused_moe import config as settings
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from primeblocks.weightsync.adapters.vllm.worker import InitInfo

    one = torch.ones(1)
    made = {
        "block": lambda: settings.fp8_w8a8_moe_quant_config(one, one, block_shape=[128, 128]),
        "static": lambda: settings.fp8_w8a8_moe_quant_config(one, one, one, one),
        "inverted": lambda: settings.fp8_w8a8_moe_quant_config(one, one, one, one, a1_gscale=one),
        "nvfp4": lambda: settings.nvfp4_w4a16_moe_quant_config(one, one, one, one),
        "mxfp4": lambda: settings.mxfp4_w4a16_moe_quant_config(one, one),
    }

    class Experts(_method()):
        def process_weights_after_loading(self, layer):
            self.moe_quant_config = made[scales]()
            self.moe_kernel = SimpleNamespace(
                fused_experts=SimpleNamespace(clamp_limit=torch.full((2,), 7.0), rank=0)
            )

    model = _TwoLayers(method := Experts())
    record_metadata_for_reloading(model)
    method.process_weights_after_loading(model.a)
    engine = _engine_of(model)
    engine.model = model
    mode = CUDAGraphMode.FULL_AND_PIECEWISE if graphs else CUDAGraphMode.NONE
    engine.vllm_config.compilation_config = SimpleNamespace(cudagraph_mode=mode)
    engine.parallel_config = SimpleNamespace(enable_eplb=False)
    engine.init_transfer_engine(InitInfo(transport={}, plan="no plan"))
    error = engine.state.message if engine.state.error == "UnsupportedError" else ""
    first = weakref.ref(method.moe_kernel.fused_experts.clamp_limit)
    first().zero_()  # As a sleep that discards weights.
    if not error:
        engine._load((f"{name}.weight", torch.ones(3, 3)) for name in "ab")
    gc.collect()
    return error, None if first() is None or error else first().tolist()


def test_a_drafter_whose_loader_returns_no_names_and_whose_kernel_removes_scales():
    assert call(_silent_draft) == [3.0, 3.0]


def _silent_draft():
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from primeblocks.weightsync.adapters.vllm.loads import WithDrafts

    class Method(_method()):
        def process_weights_after_loading(self, layer):
            if hasattr(layer, "weight_scale"):
                del layer.weight_scale

    class Draft(_TwoLayers):
        def load_weights(self, tensors):
            super().load_weights(tensors)

    of_draft = {f"draft.{one}.{what}" for one in "ab" for what in ("weight", "weight_scale")}
    both = WithDrafts(_TwoLayers(_method()()), draft := Draft(Method()), of_draft)
    for layer in (draft.a, draft.b):
        layer.weight_scale = nn.Parameter(torch.ones(4, 3), requires_grad=False)
        layer.weight_scale.weight_loader = layer.weight.weight_loader
    record_metadata_for_reloading(both)
    for layer in (draft.a, draft.b):
        layer.quant_method.process_weights_after_loading(layer)
    engine = _engine_of(both, quantization="modelopt_fp4")
    engine._load((name, torch.full((4, 3), 3.0)) for name in ("a.weight", "b.weight", *of_draft))
    return draft.rows()


def _engine_of(model, *, quantization=None):
    """A worker's end that was attached and updates this model."""
    from primeblocks.weightsync.adapters.vllm.worker import PrimeblocksEngine

    engine = object.__new__(PrimeblocksEngine)
    engine._updated, engine._direct = model, []
    engine.model_config = SimpleNamespace(quantization=quantization, dtype=torch.float32)
    engine.vllm_config = SimpleNamespace(model_config=engine.model_config)
    return engine


def _method():
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    class Method(QuantizeMethodBase):
        def create_weights(self, *_, **__): ...
        def apply(self, *_, **__): ...

    return Method
