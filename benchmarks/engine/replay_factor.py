"""By how much replay lowers the mismatch of a real vLLM with transformers, setting by setting.

Each run samples 16 x 128 tokens at temperature 1 from a model of its own seed, in vLLM, and gives
the same tokens to transformers, in one forward (eager attention), with its own routes and with the
engine's. k3 estimates KL(engine || trainer) on the sampled tokens. A factor is the geometric mean
of k3 without over k3 with replay; its interval is Student's, at 95 %, on the logarithm over seeds.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from primeblocks.errors import how_it_ended
from primeblocks.replay import Routes, compare, impose, measure_mismatch, record
from primeblocks.replay.adapters.transformers import routers
from primeblocks.replay.mismatch import Mismatch
from primeblocks.testing import tiny_models

from ..harness import main
from .environment import ENVIRONMENT

LARGE = {"num_layers": 8, "hidden": 256, "num_experts": 32, "top_k": 4, "vocab": 2048}
T_95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's, two-sided, by number of seeds
TRAINING_STEPS = 300
EXACT_K3 = 1e-11


@dataclass(frozen=True)
class Setting:
    """Where the weights come from, and who computes in which dtype."""

    engine: str
    trainers: tuple[str, ...]
    model: dict[str, Any]
    family: str = "qwen3_moe"
    seeds: int = 3
    trained: bool = False


SETTINGS = {
    "exact": Setting("float32", ("float32",), LARGE | {"init_std": 0.06}, seeds=1),
    "dominated": Setting("bfloat16", ("bfloat16", "float32"), LARGE | {"init_std": 0.06}, seeds=5),
    "family_init": Setting("bfloat16", ("bfloat16",), LARGE | {"init_std": 0.02}),
    "saturated": Setting("bfloat16", ("bfloat16",), LARGE | {"init_std": 0.06, "router_std": 0.3}),
    "glm4_moe": Setting("bfloat16", ("bfloat16",), LARGE | {"init_std": 0.06}, family="glm4_moe"),
    "trained": Setting("bfloat16", ("bfloat16", "float32"), LARGE | {"vocab": 128}, trained=True),
}


@dataclass(frozen=True)
class Run:
    without: Mismatch
    with_replay: Mismatch
    agreement: float


def text() -> torch.Tensor:
    """Python's documentation topics as bytes, shifted past the special tokens."""
    from pydoc_data.topics import topics

    letters = " ".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
    return torch.frombuffer(bytearray(letters), dtype=torch.uint8).long().clamp(max=123) + 4


def train(model: Any, seed: int) -> float:
    """A few minutes of next-letter prediction; returns the last losses' mean, in nats."""
    corpus, generator = text(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    losses = []
    for _ in range(TRAINING_STEPS):
        starts = torch.randint(len(corpus) - 129, (16,), generator=generator).tolist()
        ids = torch.stack([corpus[start : start + 129] for start in starts])
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return statistics.mean(losses[-20:])


def prepare(setting: Setting, seed: int, folder: Path) -> float:
    """Write FOLDER/model and what else the engine's job reads; returns the training loss."""
    loss = math.nan
    path = folder / "model"
    tiny_models.save(setting.family, path, seed=seed, dtype=setting.engine, **setting.model)
    if setting.trained:
        model: Any = tiny_models.build(setting.family, seed=seed, dtype="float32", **setting.model)
        loss = train(model, seed)
        model.to(getattr(torch, setting.engine)).save_pretrained(path)
        corpus = text()
        starts = torch.randint(
            len(corpus) - 32, (16,), generator=torch.Generator().manual_seed(seed + 99)
        )
        prompts = [corpus[start : start + 32].tolist() for start in starts.tolist()]
        (folder / "prompts.json").write_text(json.dumps(prompts))
    layers = setting.model["num_layers"]
    first = 1 if setting.family == "glm4_moe" else 0
    shape = {
        "num_layers": layers,
        "moe_layers": tuple(range(first, layers)),
        "num_experts": setting.model["num_experts"],
        "top_k": setting.model["top_k"],
    }
    (folder / "shape.json").write_text(json.dumps(shape))
    return loss


def sample(folder: Path, dtype: str, seed: int) -> dict[str, np.ndarray]:
    job = Path(__file__).with_name("sample_job.py")
    done = subprocess.run(
        [sys.executable, str(job), str(folder), dtype, str(seed)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{job.name} {how_it_ended(done.returncode)}\n{done.stderr[-4000:]}")
    return dict(np.load(folder / "samples.npz"))


@torch.no_grad()
def judge(folder: Path, dtype: str, samples: dict[str, np.ndarray]) -> Run:
    """transformers on the same tokens, with its own routes and with the engine's."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=getattr(torch, dtype), attn_implementation="eager"
    ).eval()

    def logprobs(tokens: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]

    own, replayed, rollouts, agreements = [], [], [], []
    for index in range(len(samples) // 3):
        tokens = torch.from_numpy(samples[f"{index}/tokens"])
        rollout = torch.from_numpy(samples[f"{index}/logprobs"])
        routes = Routes.unpack(samples[f"{index}/routes"].tobytes())
        with record(routers(model)) as tape:
            own.append(logprobs(tokens)[-len(rollout) :])
        with impose(routers(model), routes):
            replayed.append(logprobs(tokens)[-len(rollout) :])
        rollouts.append(rollout)
        agreements.append(compare(routes, tape.routes).overall)
    return Run(
        *(
            measure_mismatch(trainer_logprobs=torch.cat(ours), rollout_logprobs=torch.cat(rollouts))
            for ours in (own, replayed)
        ),
        statistics.mean(agreements),
    )


def interval(runs: list[Run]) -> tuple[float, float, float]:
    """Geometric mean of the factors, and Student's 95 % interval on their logarithm."""
    logs = [math.log(run.without.k3 / run.with_replay.k3) for run in runs]
    middle = statistics.mean(logs)
    reach = T_95[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle), math.exp(middle - reach), math.exp(middle + reach)


def figures(name: str, runs: list[Run], losses: list[float]) -> dict[str, tuple[float, str, str]]:
    factor, low, high = interval(runs)
    prefix = f"replay.factor.{name}"
    found = {
        prefix: (factor, "x", "no replay"),
        f"{prefix}.low": (low, "x", "no replay"),
        f"{prefix}.high": (high, "x", "no replay"),
        f"{prefix}.k3_without": (statistics.mean(r.without.k3 for r in runs), "nats/token", ""),
        f"{prefix}.k3_with": (statistics.mean(r.with_replay.k3 for r in runs), "nats/token", ""),
        f"{prefix}.k3_without_standard_error": (
            statistics.mean(r.without.k3_standard_error for r in runs),
            "nats/token",
            "",
        ),
        f"{prefix}.ratio_tail_without": (
            statistics.mean(r.without.ratio_tail for r in runs),
            "fraction",
            "",
        ),
        f"{prefix}.ratio_tail_with": (
            statistics.mean(r.with_replay.ratio_tail for r in runs),
            "fraction",
            "",
        ),
        f"{prefix}.sets_agree": (statistics.mean(r.agreement for r in runs), "fraction", ""),
        f"{prefix}.tokens": (sum(r.without.tokens for r in runs), "tokens", ""),
        f"{prefix}.seeds": (len(runs), "seeds", ""),
    }
    if not math.isnan(losses[0]):
        found[f"{prefix}.training_loss"] = (statistics.mean(losses), "nats/token", "")
    return found


def measure() -> dict[str, tuple[float, str, str]]:
    torch.set_num_threads(1)
    found: dict[str, tuple[float, str, str]] = {}
    for name, setting in SETTINGS.items():
        runs: dict[str, list[Run]] = {dtype: [] for dtype in setting.trainers}
        losses = []
        for seed in range(setting.seeds):
            with tempfile.TemporaryDirectory() as folder:
                losses.append(prepare(setting, seed, Path(folder)))
                samples = sample(Path(folder), setting.engine, seed)
                for dtype in setting.trainers:
                    runs[dtype].append(judge(Path(folder), dtype, samples))
        if name == "exact":
            # The gate: where nothing rounds differently, nothing may differ.
            (run,) = runs["float32"]
            assert run.agreement == 1.0, run
            assert run.without.k3 < EXACT_K3, run
            assert run.with_replay.k3 < EXACT_K3, run
            found["replay.factor.exact.sets_agree"] = (run.agreement, "fraction", "")
            found["replay.factor.exact.k3_without"] = (run.without.k3, "nats/token", "")
            continue
        for dtype, of_dtype in runs.items():
            found |= figures(f"{name}.{dtype}", of_dtype, losses)
    return found


if __name__ == "__main__":
    main(measure)
