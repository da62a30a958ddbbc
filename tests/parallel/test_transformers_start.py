"""Weights read straight into parts, and written one at a time: bytes, memory, refusals."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from primeblocks.errors import PlanError, RankError, UnsupportedError
from primeblocks.layout import layout_of, local_part
from primeblocks.parallel import plan_mesh
from primeblocks.testing import ranks, tiny_models
from primeblocks.testing.oracles import StepCounter
from tests.parallel.test_transformers_checkpoint import full_disk

FAMILIES = sorted({*tiny_models.FAMILIES, *tiny_models.OTHER_FAMILIES} - {"minimax"})
NO_EXPERTS = ("llama", "qwen3")
SIZES = {"num_experts": 6, "hidden": 64, "vocab": 30, "num_layers": 2}


def _model(family, *, device="cpu", dtype=torch.float32, tied=None, **sizes):
    layers = {"num_layers": 4} if family == "nemotron_h" else {}
    torch.manual_seed(0)
    config = tiny_models.config(family, **SIZES | layers | sizes)
    if tied is not None:
        config.tie_word_embeddings = tied
    with torch.device(device):
        return tiny_models._model_class(family).from_config(config, dtype=dtype).train()


def _start(family, *, expert=None, degrees=None, **more):
    from primeblocks.parallel.adapters.transformers import parallelize

    world_size = dist.get_world_size()
    expert = (1 if family in NO_EXPERTS else world_size) if expert is None else expert
    model = _model(family, device="meta", **more)
    degrees = {"expert": expert} if degrees is None else degrees
    parallelize(model, plan_mesh(world_size=world_size, **degrees).build("cpu"))
    return model


class Reads:
    """Bytes of each read of a file, while it is entered."""

    def __enter__(self):
        from primeblocks.parallel.adapters.transformers.checkpoint_files import Stored

        self.sizes, self._own = [], Stored.read

        def read(stored, box):
            found = self._own(stored, box)
            self.sizes.append(found.nbytes)
            return found

        Stored.read = read
        return self

    def __exit__(self, *problem):
        from primeblocks.parallel.adapters.transformers.checkpoint_files import Stored

        Stored.read = self._own


def _held_bytes(model):
    return sum(local_part(x).nbytes for x in model.state_dict().values())


def _round(families, path):
    """Read what one rank wrote, and write it again."""
    from primeblocks.parallel.adapters.transformers import load_pretrained, save_pretrained

    warnings.simplefilter("error")
    for family in families:
        one, again = path / family / "one", path / family / "again"
        if dist.get_rank() == 0:
            _model(family).save_pretrained(one)
        dist.barrier()
        model, whole = _start(family), _model(family).state_dict()
        with Reads() as reads:
            load_pretrained(model, one)
        for name, part in model.state_dict().items():
            box = layout_of(part).shard.slices
            assert torch.equal(local_part(part), whole[name][box]), (family, name)
        assert sum(reads.sizes) == _held_bytes(model), family  # Nothing twice, nothing for others.
        save_pretrained(model, again)
        if dist.get_rank() == 0:
            files = sorted(p.name for p in one.iterdir())
            assert files == sorted(p.name for p in again.iterdir()), family
            for name in files:
                assert (one / name).read_bytes() == (again / name).read_bytes(), (family, name)
            shutil.rmtree(path / family)
        dist.barrier()


def test_every_family_is_read_by_the_box_and_written_byte_for_byte(tmp_path, full):
    several = [
        *("afmoe", "deepseek_v3", "glm_moe_dsa", "gpt_oss", "hy_v4", "laguna", "llama", "mixtral"),
        *("nemotron_h", "qwen3_5_moe", "qwen3_vl_moe"),
    ]
    ranks.run(_round, FAMILIES if full else several, tmp_path, world_size=3)


def _several_files(path):
    """What this library wrote in several files, read by both."""
    from primeblocks.parallel.adapters.transformers import load_pretrained, save_pretrained

    model, whole = _start("qwen3_moe"), _model("qwen3_moe")
    for x, y in zip(model.state_dict().values(), whole.state_dict().values(), strict=True):
        local_part(x).copy_(y[layout_of(x).shard.slices])
    save_pretrained(model, path, max_shard_size="100KB")
    again = _start("qwen3_moe")
    load_pretrained(again, path)
    theirs = type(whole).from_pretrained(path).state_dict()
    for name, x in again.state_dict().items():
        assert torch.equal(theirs[name], whole.state_dict()[name]), name
        assert torch.equal(local_part(x), theirs[name][layout_of(x).shard.slices]), name


def test_several_files_have_an_index(tmp_path):
    ranks.run(_several_files, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    assert len(files) > 3
    found = {name: file for file, tensors in files.items() for name in tensors}
    assert index["weight_map"] == found
    sizes = [sum(x.nbytes for x in tensors.values()) for tensors in files.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert max(sizes) <= 100_000


def _peaks(path):
    from primeblocks.parallel.adapters.transformers import load_pretrained, save_pretrained

    sizes = {"hidden": 128, "vocab": 256, "num_experts": 16}
    if dist.get_rank() == 0:
        _model("qwen3_moe", **sizes).save_pretrained(path / "one")
    dist.barrier()
    largest = max(x.nbytes for x in load_file(path / "one" / "model.safetensors").values())
    with StepCounter() as start, Reads() as reads:
        model = _start("qwen3_moe", **sizes)
        load_pretrained(model, path / "one")
    with StepCounter() as end:
        save_pretrained(model, path / "again")
    whole = sum(x.nbytes for x in load_file(path / "again" / "model.safetensors").values())
    return start.peak_bytes, max(reads.sizes), end.peak_bytes, _held_bytes(model), largest, whole


def test_memory_holds_the_shard_and_one_tensor(tmp_path):
    for rank, found in enumerate(ranks.run(_peaks, tmp_path, world_size=4)):
        start, read, end, shard, largest, whole = found
        assert whole > 3 * (shard + largest)  # Else it shows nothing.
        # Agreements take some bytes, and so do frequencies, which no checkpoint holds.
        assert start <= 1.01 * shard
        assert read <= largest
        assert end <= 1.01 * (largest if rank == 0 else shard)


def _odd(path):
    """Of each case: what rank 0 received to write, and what it lacked."""
    from primeblocks.parallel.adapters.transformers import load_pretrained, save_pretrained

    found = {}
    for case, (degrees, sizes, dtype) in ODD.items():
        one, again = path / case / "one", path / case / "again"
        if dist.get_rank() == 0:
            _model("qwen3_moe", **sizes).save_pretrained(one)
        dist.barrier()
        model = _start("qwen3_moe", degrees=degrees, dtype=dtype, **sizes)
        whole = _model("qwen3_moe", **sizes).to(dtype).state_dict()
        load_pretrained(model, one)
        for name, part in model.state_dict().items():
            box = layout_of(part).shard.slices
            assert torch.equal(local_part(part), whole[name][box]), (case, name)
        with StepCounter() as step:
            save_pretrained(model, again)
        if dist.get_rank() == 0:
            written = load_file(again / "model.safetensors")
            theirs = load_file(one / "model.safetensors")
            assert written.keys() == theirs.keys()
            assert all(torch.equal(x, theirs[name].to(dtype)) for name, x in written.items())
            lacked = sum(x.nbytes for x in whole.values()) - _held_bytes(model)
            found[case] = step.received_bytes["recv_"], lacked
    return found


ODD = {
    "copies": ({"expert": 2, "replicate": 2}, {}, torch.float32),
    "fewer experts than ranks": ({}, {"num_experts": 2}, torch.float32),
    "cast": ({"expert": 2}, {}, torch.bfloat16),
}


def test_copies_uneven_experts_and_another_dtype(tmp_path):
    by_case = ranks.run(_odd, tmp_path, world_size=4)[0]
    assert by_case.keys() == ODD.keys()
    for case, (received, lacked) in by_case.items():
        assert received == lacked, case  # Nothing twice.


def _computed(path):
    """Conversions that compute with weights, which would need the whole of them."""
    from transformers.core_model_loading import MergeModulelist, SplitModulelist

    from primeblocks.parallel.adapters.transformers import load_pretrained, save_pretrained

    first = dist.get_rank() == 0
    if first:
        _model("qwen3_moe").save_pretrained(path / "one")
    dist.barrier()
    model = _start("qwen3_moe")
    for kind, error, use, said in [
        (MergeModulelist, PlanError if first else RankError, load_pretrained, "box by box"),
        (SplitModulelist, UnsupportedError, save_pretrained, "cannot be deferred"),
    ]:
        own = kind.convert

        def computed(op, tensors, *args, own=own, **kwargs):
            return own(op, {k: _half_twice(v) for k, v in tensors.items()}, *args, **kwargs)

        kind.convert = computed
        with pytest.raises(error, match=said):
            use(model, path / "one")
        kind.convert = own
    load_pretrained(model, path / "one")  # And all is well again.


def _half_twice(x):
    return [one / 2 * 2 for one in x] if isinstance(x, list) else x / 2 * 2


def test_what_must_be_computed_with_is_refused(tmp_path):
    ranks.run(_computed, tmp_path)


def _damage(path, name):
    """A folder like that of one rank, with changes."""
    shutil.copytree(path / "one", path / name)
    file = path / name / "model.safetensors"
    return file, load_file(file)


def _refusals(path):
    from primeblocks.parallel.adapters.transformers import load_pretrained, save_pretrained

    warnings.simplefilter("error")
    rank, expert = dist.get_rank(), "model.layers.1.mlp.experts.5.down_proj.weight"
    if rank == 0:
        _model("qwen3_moe").save_pretrained(path / "one")
        file, tensors = _damage(path, "fewer")
        save_file({k: v for k, v in tensors.items() if k != expert}, file, {"format": "pt"})
        file, tensors = _damage(path, "wider")
        tensors["lm_head.weight"] = torch.zeros(31, 64)
        save_file(tensors, file, {"format": "pt"})
        file, tensors = _damage(path, "more")
        save_file(tensors | {"model.extra": torch.zeros(3)}, file, {"format": "pt"})
        (path / "bin").mkdir()
        shutil.copy(path / "one" / "config.json", path / "bin")
        torch.save(tensors, path / "bin" / "pytorch_model.bin")
        (path / "a file").write_text("")
        config = json.loads((path / "one" / "config.json").read_text())
        shutil.copytree(path / "one", path / "gptq")
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
        (path / "gptq" / "config.json").write_text(json.dumps(config))
        _model("qwen3_moe").save_pretrained(path / "index", max_shard_size="100KB")
        (path / "index" / "model.safetensors.index.json").write_text("{}")
    dist.barrier()
    model = _start("qwen3_moe")
    error = PlanError if rank == 0 else RankError
    for name, said in [
        (
            "fewer",
            r"experts.down_proj is \(5, 64, 64\) in the checkpoint and \(6, 64, 64\) in the model",
        ),
        ("wider", r"lm_head.weight is \(31, 64\) in the checkpoint and \(30, 64\) in the model"),
        ("bin", "cannot be read as a Qwen3MoeForCausalLM"),
        ("index", "cannot be read as a Qwen3MoeForCausalLM: KeyError: 'weight_map'"),
        ("gptq", "quantized by 'gptq'.* Save them dequantized first"),
    ]:
        with pytest.raises(error, match=said):
            load_pretrained(model, path / name)
    with pytest.raises(RankError if rank == 0 else PlanError, match="cannot be read as a Qwen3Moe"):
        load_pretrained(model, path / ("one" if rank == 0 else "nowhere"))
    with pytest.raises(PlanError, match="the checkpoint must be equal on all ranks"):
        load_pretrained(model, _other(path) if rank else path / "one")
    with pytest.raises(error, match=r"a file.* cannot be written"):
        save_pretrained(model, path / "a file" / "under")
    with full_disk(200_000), pytest.raises(error, match="File too large"):
        save_pretrained(model, path / "full")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        load_pretrained(model, path / "more")
    said = [str(w.message) for w in warned]
    assert (
        said == [] if rank else ["1 weights of the checkpoint match no parameter: model.extra ..."]
    )
    load_pretrained(model, path / "one")  # And all is well again.
    return float(sum(p.full_tensor().isnan().sum() for p in model.parameters()))


def _other(path):
    """The same names in another dtype, where one rank alone sees it."""
    file, tensors = _damage(path, "other")
    save_file({k: v.bfloat16() for k, v in tensors.items()}, file, {"format": "pt"})
    return Path(path / "other")


def test_what_cannot_be_read_or_written_is_an_error_on_all_ranks(tmp_path):
    assert ranks.run(_refusals, tmp_path) == [0.0, 0.0]


def _tied(path):
    """Tied weights under one name, under both, and under both with other rows on the last rank."""
    from primeblocks.parallel.adapters.transformers import load_pretrained

    first, name = dist.get_rank() == 0, "lm_head.weight"
    model = _start("qwen3_moe", tied=True)
    if first:
        _model("qwen3_moe", tied=True).save_pretrained(path / "one")
        for folder, more in (("both", 0), ("apart", 1)):
            file, tensors = _damage(path, folder)
            tensors[name] = tensors["model.embed_tokens.weight"].clone()
            tensors[name][-1, -1] += more
            save_file(tensors, file, {"format": "pt"})
    dist.barrier()
    held = sum(local_part(p).nbytes for p in model.parameters())  # Tied weights once.
    second = local_part(model.lm_head.weight).nbytes
    for folder, size in (("one", held), ("both", held + second)):
        with Reads() as reads:
            load_pretrained(model, path / folder)
        assert sum(reads.sizes) == size
    with pytest.raises(RankError if first else PlanError, match=f"different tensors for {name}"):
        load_pretrained(model, path / "apart")


def test_tied_weights_that_differ_are_refused(tmp_path):
    ranks.run(_tied, tmp_path)
