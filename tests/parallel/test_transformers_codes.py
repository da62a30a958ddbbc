"""Float8 checkpoints of any width, read by the box and compared with a plain loop."""

import json
import warnings

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from primeblocks.errors import PlanError, RankError
from primeblocks.layout import Shard, local_part
from primeblocks.parallel import plan_mesh
from primeblocks.testing import ranks, tiny_models
from tests.parallel.test_transformers_start import Reads

BLOCK = (128, 128)


def _loop(codes, scales, block):
    """Code times scale, block by block: the plain loop."""
    out = codes.float()
    matrices, grids = (x.view(-1, *x.shape[-2:]) for x in (out, scales.float()))
    for matrix, grid in zip(matrices, grids, strict=True):
        for i in range(grid.shape[0]):
            for j in range(grid.shape[1]):
                rows = slice(i * block[0], (i + 1) * block[0])
                matrix[rows, j * block[1] : (j + 1) * block[1]] *= grid[i, j]
    return out


def _quantize(weight, block, kind=torch.float32, seed=0):
    """Codes and scales, each scale its own, so that one that is misplaced shows."""
    *lead, rows, columns = weight.shape
    generator = torch.Generator().manual_seed(seed)
    grid = (*lead, -(-rows // block[0]), -(-columns // block[1]))
    scales = torch.randint(-6, 6, grid, generator=generator).float().exp2()
    if kind == torch.float32:
        scales *= 1 + torch.rand(grid, generator=generator)
    codes = (torch.randn(weight.shape, generator=generator) * 64).to(torch.float8_e4m3fn)
    return codes, scales.to(kind)


@pytest.mark.parametrize(
    ("shape", "block", "kind"),
    [
        ((160, 160), (128, 128), torch.float32),
        ((576, 160), (128, 128), torch.float32),
        ((3, 200, 130), (128, 128), torch.bfloat16),
        ((2, 5, 7), (2, 3), torch.float8_e8m0fnu),
        ((127, 129), (128, 128), torch.float16),
        ((256, 384), (128, 64), torch.float32),
        ((1, 1), (128, 128), torch.float32),
        ((2, 2, 33, 65), (32, 32), torch.float32),
        ((3, 33, 65), None, torch.float32),  # One scale a matrix.
    ],
)
def test_every_box_is_code_times_scale(shape, block, kind, tmp_path):
    from primeblocks.parallel.adapters.transformers.checkpoint_files import (
        open_checkpoint,
        with_numbers,
    )

    codes, scales = _quantize(torch.empty(shape), block or shape[-2:], kind)
    one = torch.tensor(0.75)  # A scale for all, and codes of it.
    save_file(
        {"w": codes, "w_scale_inv": scales, "one": codes.clone(), "one_scale_inv": one},
        tmp_path / "model.safetensors",
    )
    found = with_numbers(open_checkpoint(tmp_path), block and list(block))
    assert found.keys() == {"w", "one"}
    assert torch.equal(
        found["one"].pieces[0].source.read(found["one"].pieces[0].box), codes.float() * 0.75
    )
    weight = found["w"]
    assert (tuple(weight.shape), weight.dtype) == (shape, torch.float32)
    want, generator = _loop(codes, scales, block or shape[-2:]), torch.Generator().manual_seed(1)
    boxes = [Shard((0,) * len(shape), shape)]
    for _ in range(40):
        pairs = [sorted(torch.randint(n + 1, (2,), generator=generator).tolist()) for n in shape]
        pairs = [
            (min(a, n - 1), max(b, min(a, n - 1) + 1))
            for (a, b), n in zip(pairs, shape, strict=True)
        ]
        boxes.append(Shard(tuple(a for a, _ in pairs), tuple(b - a for a, b in pairs)))
    for box in boxes:
        for piece in weight.within(box):
            assert torch.equal(piece.arrange(piece.source.read(piece.box)), want[box.slices]), box


CASES = {
    # Hidden 160, and experts of 96 rows: ragged both ways.
    "qwen3_moe": {"hidden_size": 160, "moe_intermediate_size": 96},
    # 512 + 64 rows: four and a half blocks.
    "deepseek_v3": {"hidden_size": 160, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "stacked": {"hidden_size": 160, "moe_intermediate_size": 136},
}


def _model(case, device="cpu", dtype=torch.float32):
    family = "qwen3_moe" if case == "stacked" else case
    config = tiny_models.config(family, num_experts=6, hidden=64, vocab=30, num_layers=2)
    for name, value in CASES[case].items():
        assert hasattr(config, name)
        setattr(config, name, value)
    torch.manual_seed(0)
    with torch.device(device):
        return tiny_models._model_class(family).from_config(config, dtype=dtype).train()


def _write(case, path):
    """A checkpoint in float8, and by the model's own names what a plain loop makes of it."""
    from transformers.core_model_loading import revert_weight_conversion

    model = _model(case)
    stacked = case == "stacked"
    own = model.state_dict() if stacked else revert_weight_conversion(model, model.state_dict())
    tensors, numbers = {}, {}
    for seed, (name, x) in enumerate(own.items()):
        numbers[name] = tensors[name] = x.clone()
        # Routers, norms and the embeddings stay as they are.
        if ("_proj" in name or "kv_" in name) and x.ndim > 1:
            codes, scales = _quantize(x, BLOCK, seed=seed)
            tensors |= {name: codes, f"{name}_scale_inv": scales}
            numbers[name] = _loop(codes, scales, BLOCK)
    plain, codes = path / "plain", path / "codes"
    model.save_pretrained(plain)
    model.save_pretrained(codes)
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    save_file(tensors, codes / "model.safetensors", {"format": "pt"})
    _configure(codes, {"quant_method": "fp8", "weight_block_size": list(BLOCK)})


def _configure(path, method):
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = method
    (path / "config.json").write_text(json.dumps(config))


def _start(case, dtype=torch.float32):
    from primeblocks.parallel.adapters.transformers import parallelize

    model, ranks_ = _model(case, "meta", dtype), dist.get_world_size()
    model.config.quantization_config = FP8  # As AutoConfig.from_pretrained leaves it.
    parallelize(model, plan_mesh(world_size=ranks_, expert=ranks_).build("cpu"))
    return model


def _read(case, path):
    from primeblocks.parallel.adapters.transformers import load_pretrained, save_pretrained

    warnings.simplefilter("error")
    if dist.get_rank() == 0:
        _write(case, path)
    dist.barrier()
    plain, sizes = _start(case), []
    load_pretrained(plain, path / "plain")
    for dtype in (torch.float32, torch.bfloat16):
        model = _start(case, dtype)
        with Reads() as reads:
            load_pretrained(model, path / "codes")
        for (name, x), y in zip(
            model.state_dict().items(), plain.state_dict().values(), strict=True
        ):
            assert torch.equal(local_part(x), local_part(y).to(dtype)), (case, name)
        sizes.append(sum(reads.sizes))
    save_pretrained(model, path / "again")
    return sizes


@pytest.mark.parametrize("case", sorted(CASES))
def test_codes_of_any_width_are_read_on_every_rank(case, tmp_path):
    found = ranks.run(_read, case, tmp_path, world_size=3)
    stored = load_file(tmp_path / "codes" / "model.safetensors")
    whole = sum(x.nbytes for x in stored.values())
    quantized = sum(x.numel() for x in stored.values() if x.dtype == torch.float8_e4m3fn)
    assert quantized > whole / 2
    for first, second in found:
        assert first == second < whole / 2  # A third, and scales of blocks that are cut.
    again = load_file(tmp_path / "again" / "model.safetensors")
    for name, x in again.items():  # transformers keeps these biases in float32.
        is_bias = name.endswith("e_score_correction_bias")
        assert x.dtype == (torch.float32 if is_bias else torch.bfloat16)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert "quantization_config" not in config  # Engines would look for codes.


REFUSED = {
    "no scales": (lambda t: t.pop(NAME + "_scale_inv"), "scale_inv is missing"),
    "no codes": (lambda t: t.pop(NAME), "contains scales, but .* is missing"),
    "fewer scales": (
        lambda t: t.update({NAME + "_scale_inv": t[NAME + "_scale_inv"][:-1].contiguous()}),
        r"is \(160, 64\) with scales \(1, 1\), but blocks of 128 x 128 need scales \(2, 1\)",
    ),
    "bytes": (lambda t: t.update({NAME: t[NAME].view(torch.int8)}), "torch.int8 with scales in"),
    "exponents": (
        lambda t: t.update({NAME + "_scale_inv": t[NAME + "_scale_inv"].to(torch.uint8)}),
        "with scales in torch.uint8",
    ),
}
NAME = "model.layers.0.self_attn.o_proj.weight"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
METHODS = {
    "another block": (FP8 | {"weight_block_size": [64, 64]}, "blocks of 64 x 64 need scales"),
    "one scale a matrix": (FP8 | {"weight_block_size": None}, r"need scales \(1, 1\)"),
    "no sizes": (FP8 | {"weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\]"),
    "text": (FP8 | {"weight_block_size": "128"}, "weight_block_size is '128'"),
    "no method": ({}, r"need scales \(1, 1\)"),
    "unknown": ({"quant_method": "ours"}, "quantized by 'ours', but load_pretrained reads"),
}


def _refuse(path):
    from primeblocks.parallel.adapters.transformers import load_pretrained

    first = dist.get_rank() == 0
    model, codes = _start("qwen3_moe"), path / "codes"
    if first:
        _write("qwen3_moe", path)
    own = load_file(codes / "model.safetensors") if first else {}
    dist.barrier()
    for damage, said in REFUSED.values():
        if first:
            tensors = dict(own)
            damage(tensors)
            save_file(tensors, codes / "model.safetensors", {"format": "pt"})
        dist.barrier()
        with pytest.raises(PlanError if first else RankError, match=said):
            load_pretrained(model, codes)
    if first:
        save_file(own, codes / "model.safetensors", {"format": "pt"})
    for method, said in METHODS.values():
        if first:
            _configure(codes, method)
        dist.barrier()
        with pytest.raises(PlanError if first else RankError, match=said):
            load_pretrained(model, codes)
    if first:
        _configure(codes, {"quant_method": "fp8", "activation_scheme": "static"})  # 128 by default
        scales = {f"{NAME.removesuffix('weight')}input_scale": torch.ones(())}
        save_file(own | scales, codes / "model.safetensors", {"format": "pt"})
    dist.barrier()
    load_pretrained(model, codes)  # And all is well again.


def test_codes_that_do_not_fit_are_refused_on_all_ranks(tmp_path):
    ranks.run(_refuse, tmp_path)
