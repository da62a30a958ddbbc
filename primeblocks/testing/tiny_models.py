"""Random mixture-of-experts models of common families, small enough for a laptop.

`build` makes a model in memory. `save` writes a checkpoint with a tokenizer, which transformers can
load for all families, and vLLM for some families. Equal arguments give equal bytes.
"""

import json
from pathlib import Path
from typing import Any

import torch

from primeblocks.errors import UsageError, needs

from .tiny_families import CONFIGS, OTHERS, composite, layer_kinds

__all__ = ["FAMILIES", "OTHER_FAMILIES", "build", "config", "save"]

FAMILIES = tuple(CONFIGS)
OTHER_FAMILIES = tuple(OTHERS)

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


def config(
    family: str,
    *,
    num_layers: int = 4,
    hidden: int = 128,
    num_experts: int = 8,
    top_k: int = 2,
    vocab: int = 512,
    init_std: float | None = None,
) -> Any:
    """Return a transformers configuration of a model family, with small sizes. Local.

    Args:
        family: a name in `FAMILIES`, or in `OTHER_FAMILIES` (vision models and dense models).
        hidden: the hidden size, a multiple of 32. In most families, attention heads have 32 dims,
            and `hidden` is also the intermediate size of experts.
        vocab: the vocabulary size: 4 special tokens and the words `w4`, `w5`, ...
        init_std: standard deviation of the weights. The default is the value of the family.

    Raises:
        MissingPackageError: transformers is not installed.
        UsageError: `family` is unknown, or a size is not allowed.
    """
    known = CONFIGS | OTHERS
    if family not in known:
        raise UsageError(f"family must be one of {', '.join(known)}; got {family!r}")
    if hidden % 32 or top_k > num_experts or vocab <= len(_SPECIAL):
        raise UsageError(
            "a tiny model needs hidden divisible by 32, top_k <= num_experts and vocab > "
            f"{len(_SPECIAL)}; got hidden={hidden}, top_k={top_k}, num_experts={num_experts}, "
            f"vocab={vocab}"
        )
    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden // 32,
        "num_experts_per_tok": top_k,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    if init_std is not None:
        sizes["initializer_range"] = init_std
    class_name, own = known[family]
    sizes |= own(hidden, num_experts) | layer_kinds(family, num_layers)
    return getattr(_transformers(), class_name)(**composite(class_name, sizes))


def build(
    family: str,
    *,
    seed: int = 0,
    dtype: str | torch.dtype = "bfloat16",
    router_std: float | None = None,
    **sizes: Any,
) -> Any:  # A PreTrainedModel.
    """Build a random model in memory, in eval mode. Torch's random state is unchanged. Local.

    Args:
        router_std: standard deviation of the router's weights. A larger value makes scores of
            experts differ more, and a smaller value makes ties more frequent.
        sizes: as for `config`.
    """
    configuration = config(family, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Drawn in float32, so that dtypes of one seed differ only by rounding.
        model = _model_class(family).from_config(configuration, dtype=torch.float32)
        if router_std is not None:
            for parameter in _router_weights(model):
                torch.nn.init.normal_(parameter, 0.0, router_std)
    return model.to(_dtype(dtype)).eval()


def save(
    family: str,
    path: str | Path,
    *,
    seed: int = 0,
    dtype: str | torch.dtype = "bfloat16",
    router_std: float | None = None,
    **sizes: Any,
) -> Path:
    """Write the model of `build` and a tokenizer into the folder `path`. Return `path`. Local.

    The tokenizer splits at white space, so the text `w7 w9` has the token ids 7 and 9.

    docs/support.md lists the families with which vLLM can generate on a CPU. For glm4_moe_lite,
    pass `compilation_config={"custom_ops": ["all", "-rotary_embedding"]}` to vLLM, so that vLLM's
    CPU kernel rotates queries correctly.
    """
    path = Path(path)
    model: Any = build(family, seed=seed, dtype=dtype, router_std=router_std, **sizes)
    model.save_pretrained(path)
    if family == "deepseek_v3":
        # transformers drops this key. vLLM needs it to create the router's correction bias.
        _amend(path / "config.json", topk_method="noaux_tc")
    vocab = model.config.get_text_config().vocab_size
    _write_tokenizer(path, vocab, _vision_words(vocab) if family == "qwen3_vl_moe" else {})
    if family == "qwen3_vl_moe":
        _publish(path, model.config.vision_config)
    return path


def _model_class(family: str) -> Any:
    sees = family == "qwen3_vl_moe"
    return getattr(
        _transformers(), "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
    )


def _router_weights(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the matrices that score experts."""
    ends = ("mlp.gate.weight", "mlp.router.weight", "mlp.router.gate.weight", "mixer.gate.weight")
    return [parameter for name, parameter in model.named_parameters() if name.endswith(ends)]


def _vision_words(vocab: int) -> dict[int, str]:
    names = ("vision_end", "vision_start", "video_pad", "image_pad")
    return {vocab - 4 + i: f"<|{name}|>" for i, name in enumerate(names)}


def _publish(path: Path, vision: Any) -> None:
    """Write experts as published checkpoints have them, and configure the image processor.

    transformers reads both orientations and writes its own, which vLLM does not read.
    """
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    turned = {
        name: weight.mT.contiguous() if ".experts." in name else weight
        for name, weight in load_file(file).items()
    }
    save_file(turned, file, metadata={"format": "pt"})
    sizes = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
        "size": {"shortest_edge": 64, "longest_edge": 4096},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "processor_class": "Qwen3VLProcessor",
    }
    for kind, own in (
        ("preprocessor", {"image_processor_type": "Qwen2VLImageProcessor"}),
        ("video_preprocessor", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        (path / f"{kind}_config.json").write_text(json.dumps(sizes | own))


def _write_tokenizer(path: Path, vocab: int, others: dict[int, str]) -> None:
    words = [*_SPECIAL, *(f"w{index}" for index in range(len(_SPECIAL), vocab))]
    for index, word in others.items():
        words[index] = word
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = [
        {"id": index, "content": word, "special": True, **plain}
        for index, word in {**dict(enumerate(_SPECIAL)), **others}.items()
    ]
    model = {
        "type": "WordLevel",
        "vocab": {word: index for index, word in enumerate(words)},
        "unk_token": "<unk>",
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    settings = {f"{word.strip('<>')}_token": word for word in _SPECIAL} | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _amend(file: Path, **entries: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries, indent=2))


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise UsageError(f"dtype must name a dtype of torch, such as 'bfloat16'; got {dtype!r}")
    return found


def _transformers() -> Any:
    with needs("transformers", extra="transformers"):
        import transformers
    return transformers
