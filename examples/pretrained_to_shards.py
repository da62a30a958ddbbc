"""Load a transformers checkpoint into the shards of many ranks, train, and save the model.

No rank stores the whole model. If you run the script a second time, with another even number of
ranks, the second run continues the first run.

    torchrun --nproc-per-node 4 examples/pretrained_to_shards.py
    torchrun --nproc-per-node 2 examples/pretrained_to_shards.py
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from primeblocks import parallel
from primeblocks.layout import local_part
from primeblocks.parallel.adapters.transformers import (
    load_pretrained,
    parallelize,
    save_pretrained,
)

FOLDER = Path(tempfile.gettempdir()) / "pretrained_to_shards"
MADE = FOLDER / "pretrained"
CHECKPOINT = MADE  # Or another folder, or "Qwen/Qwen3-30B-A3B".
RUN = FOLDER / str(CHECKPOINT).replace("/", "-")  # Each checkpoint has a run of its own.
STEPS, ROWS, TOKENS, RATE = 2, 8, 32, 1e-2  # Steps per run, rows per batch of all ranks.
CONFIG = Qwen3MoeConfig(
    vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
    num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
    intermediate_size=128, dtype="float32",
)  # fmt: skip


def batch(step: int) -> torch.Tensor:
    return torch.randint(512, (ROWS, TOKENS), generator=torch.manual_seed(step))


def train(model, optimizer, meshes, step: int) -> float:
    """Make one step on this rank's rows. Return the mean loss over all ranks."""
    ids = batch(step).tensor_split(dist.get_world_size())[dist.get_rank()]
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    loss = -logits.gather(-1, ids[:, 1:, None]).sum() / (ROWS * (TOKENS - 1))
    loss.backward()
    parallel.clip_grad_norm_(model.parameters(), 1.0, meshes=meshes, optimizer=optimizer)
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss.item()


def shown_in(bar: tqdm) -> Callable[[int, int], None]:
    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return show


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0 and CHECKPOINT == MADE and not MADE.exists():
        AutoModelForCausalLM.from_config(CONFIG).save_pretrained(MADE)
    dist.barrier()

    config = AutoConfig.from_pretrained(CHECKPOINT)
    with torch.device("meta"):  # Only names and shapes. In bfloat16, AdamW would lose small steps.
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    meshes = parallel.plan_mesh(world_size=ranks, expert=2).build("cpu")
    parallelize(model, meshes)  # Allocates memory for this rank's parts.
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    whole = [path.parent for path in RUN.glob("step-*/.metadata")]
    saved = sorted(whole, key=lambda path: int(path.name[5:]))
    start = int(saved[-1].name[5:]) if saved else 0
    if saved:  # Any number of ranks may have saved the weights and moments.
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=saved[-1])
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    else:  # Each rank reads its boxes from the files.
        with tqdm(desc="load", unit="tensor", disable=rank > 0) as bar:
            load_pretrained(model, CHECKPOINT, progress=shown_in(bar))
    held = sum(local_part(p).numel() for p in model.parameters())
    if rank == 0:
        print(f"{ranks} ranks, from step {start}: rank 0 holds {held} of {model.num_parameters()}")

    end = start + STEPS
    for step in range(start, end):
        loss = train(model, optimizer, meshes, step)
        if rank == 0:
            print(f"step {step}, loss {loss:.6f}")
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=RUN / f"step-{end}")
    with tqdm(desc="save", unit="tensor", disable=rank > 0) as bar:
        # The files that from_pretrained and engines read.
        save_pretrained(model, RUN / "trained", progress=shown_in(bar))
    dist.barrier()  # Else a rank may abort at its end: Gloo drops the last tensors in a thread.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
