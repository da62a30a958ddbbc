"""Images, prompts that show them, and what Qwen3-VL takes for one sample or for a pack."""

import itertools

import numpy as np
import torch

from primeblocks import losses, replay
from primeblocks.attachments import Aligned

EXPERTS, VOCABULARY = 8, 64
IMAGE, VIDEO, START, END = (VOCABULARY - 1 - i for i in range(4))  # As `tiny_models` has them.
PATCH = 3 * 2 * 4 * 4  # Values of a patch: colours, frames, height and width.
PATCHES_A_TOKEN = 4


def image(height: int, width: int, *, seed: int) -> dict[str, np.ndarray]:
    """Return what the processor of Qwen-VL makes of an image: patches, and their grid."""
    generator = np.random.default_rng(seed)
    patches = generator.standard_normal((height * width, PATCH)).astype(np.float32)
    return {"pixel_values": patches, "image_grid_thw": np.array([[1, height, width]])}


def said(history: list[int], ids: list[int], images: list[dict]) -> tuple[list, list[Aligned]]:
    """Return tokens in which an image follows each new START, and where these images are."""
    tokens, found, left = list(history), [], iter(images)
    for token in ids:
        tokens.append(token)
        if token == START:
            each = next(left)
            count = len(each["pixel_values"]) // PATCHES_A_TOKEN
            found.append(Aligned(each, len(tokens), len(tokens) + count))
            tokens += [IMAGE] * count + [END]
    return tokens, found


def inputs_of(images: list[dict]) -> dict[str, torch.Tensor]:
    if not images:
        return {}
    return {
        name: torch.from_numpy(np.concatenate([each[name] for each in images]))
        for name in ("pixel_values", "image_grid_thw")
    }


def alone(model, tokens, images):
    """The logits of one sample, as transformers is called with it: images are found by their id."""
    ids = torch.tensor(np.asarray(tokens))[None]
    kinds = {"mm_token_type_ids": (ids == IMAGE).int()} if images else {}
    return model(input_ids=ids, use_cache=False, **inputs_of(images), **kinds).logits[0]


def packed_inputs(model, packed):
    """Return what Qwen3-VL takes for a pack: images in order, and places in each document.

    Positions are those of the text, from whose restarts transformers makes the mask of documents,
    and of M-RoPE; the model finds images by the id of their tokens.
    """
    images = packed.aligned("images")
    tokens = torch.from_numpy(packed.tokens)
    kinds = torch.zeros_like(tokens)
    for each in images:
        kinds[each.start : each.stop] = 1
    places = []
    for start, stop in itertools.pairwise(packed.cu_seqlens.tolist()):
        grids = [x.value["image_grid_thw"] for x in images if start <= x.start < stop]
        found, _ = model.model.get_rope_index(
            tokens[None, start:stop],
            kinds[None, start:stop],
            image_grid_thw=torch.from_numpy(np.concatenate(grids)) if grids else None,
        )
        places.append(found)
    text = torch.from_numpy(packed.positions)[None, None]
    positions = torch.cat([text, torch.cat(places, dim=-1)])
    values = inputs_of([each.value for each in images])
    return {"input_ids": tokens[None], "position_ids": positions, "use_cache": False, **values}


def packed_logprobs(model, packed):
    hidden = model.model(**packed_inputs(model, packed)).last_hidden_state[0]
    targets = torch.from_numpy(packed.targets)
    return losses.logprobs.token_logprobs(hidden[packed.predictors], model.lm_head.weight, targets)


def packed_routes(packed):
    rows = packed.per_token["routes"]
    return replay.Routes.from_array(
        rows,
        num_experts=EXPERTS,
        layer_ids=range(rows.shape[1]),
        missing=~rows.any(axis=(1, 2)),  # No row names an expert twice.
    )


A, B, C, D, E, F = (
    image(h, w, seed=seed)
    for seed, (h, w) in enumerate([(4, 6), (2, 4), (6, 2), (4, 4), (4, 6), (4, 6)])
)
# Two images of one size beside each other: their order shows in nothing but the result.
LATE = ([5, 6, 7], []), ([8, START, 9, START, 10], [A, E])
EARLY = ([START, 11, START, 12], [B, C]), ([13, 14, START, 15], [D])
