"""A trainer rank. FSDP2 shards the dense weights, and each rank has a part of the experts."""

import math
import random
import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from primeblocks import losses, parallel, replay, weightsync
from primeblocks.exact import batch_invariant
from primeblocks.losses.packing import Pack, TreePlan, pack, plan_trees
from primeblocks.parallel.adapters.transformers import (
    load_pretrained,
    local_inputs,
    parallelize,
)
from primeblocks.replay.adapters import vllm as replay_vllm
from primeblocks.replay.adapters.transformers import routers
from primeblocks.rollout import Group, Rollout

from .task import answer_of, prompt_of

SEED = 0
WRONG_DEMONSTRATIONS = 0.5
WARM_BATCH, WARM_LR, LR = 32, 1e-3, 3e-4
LOSSES = {
    "grpo": losses.grpo_loss,
    "aipo": losses.aipo_loss,
    "cispo": partial(losses.cispo_loss, clip_high=4.0),
    "gspo": partial(losses.gspo_loss, clip_low=0.03, clip_high=0.04),
    "sapo": losses.sapo_loss,
    "reinforce": partial(losses.cispo_loss, clip_low=0.0, clip_high=0.0),
}
TIMEOUT_S = 120.0


class Trainer:
    """A trainer rank that trains with the engine's routes and publishes its shards."""

    def __init__(
        self,
        checkpoint: Path,
        device: torch.device,
        transport: weightsync.transports.Transport,
        *,
        use_fp8: bool = False,
        use_exact: bool = False,
        use_trees: bool = False,
        use_replay: bool = True,
        recompute: bool = False,
        loss: str = "grpo",
        lr: float = LR,
    ) -> None:
        self.rank, self.world_size, self.device = dist.get_rank(), dist.get_world_size(), device
        self.loss, self.use_exact, self.use_trees = LOSSES[loss], use_exact, use_trees
        self.use_replay, self.lr = use_replay, lr
        with torch.device("meta"):  # Only names and shapes.
            config = AutoConfig.from_pretrained(checkpoint)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if recompute:  # Backward computes each layer again, so only the layers' inputs are stored.
            model.gradient_checkpointing_enable({"use_reentrant": False})
        held_as = torch.float32 if use_exact else torch.bfloat16
        whole = weightsync.describe(model, dtype=held_as)  # the engine's tensors
        transfer_encoding = None
        if use_fp8:
            from primeblocks import fp8
            from primeblocks.fp8.adapters.transformers import convert
            from primeblocks.fp8.reference import SimulatedGemm

            # Each rank's shard of every projection has a multiple of 32 rows.
            recipe = fp8.Recipe(weights=fp8.Tile(32, 128), gemm=SimulatedGemm())
            layers = convert(model, recipe, only=r"self_attn\.[qkvo]_proj|mlp\.experts")
        plan = parallel.plan_mesh(world_size=self.world_size, expert=self.world_size)
        self.meshes = plan.build(device.type)
        parallelize(model, self.meshes)  # Allocates memory for this rank's parts.
        load_pretrained(model, checkpoint)
        held = weightsync.describe(model)
        if use_fp8:
            # In bfloat16, because vLLM does not have float8 kernels on a CPU.
            transfer_encoding = fp8.encode_weights(
                recipe,
                only=layers,
                layouts={name: tensor.layout for name, tensor in held.items()},
                form="simulated",
            )
        self.model, self.routers = model.train(), routers(model)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=WARM_LR, betas=(0.9, 0.95), weight_decay=0.0
        )
        if use_fp8:  # Each weight is rounded once per step.
            fp8.WeightCache(model, self.optimizer)
        sources = weightsync.convert.gather_manifests(held)
        self.sync_plan = weightsync.plan_sync(sources, whole)
        self.transport = transport
        self.publisher = weightsync.Publisher(
            self.sync_plan, model, self.transport, encode=transfer_encoding
        )
        if self.rank == 0:
            print(plan.table(), self.sync_plan.table(), sep="\n\n", flush=True)

    def warm_start(self, texts: list[str], steps: int) -> float:
        """Make supervised steps on right and wrong demonstrations. Return the last loss."""
        chance = random.Random(SEED + 1 + self.rank)
        loss = torch.zeros(())
        for step in tqdm(range(steps), desc="warm start", disable=self.rank > 0):
            chosen = chance.sample(texts, WARM_BATCH // self.world_size)
            shown = [t if chance.random() < WRONG_DEMONSTRATIONS else t[::-1] for t in chosen]
            rows = [demonstration(*each) for each in zip(chosen, shown, strict=True)]
            loss = self.imitate(pack(rows, range(len(rows))), WARM_LR * min(1.0, (step + 1) / 50))
        return loss.item()

    def imitate_share(self, rows: Sequence[Rollout], lr: float) -> float:
        """Make one supervised step. Each rank computes the loss of a share of the rows."""
        packed = pack(rows, range(self.rank, len(rows), self.world_size))
        return self.imitate(packed, lr).item()

    def imitate(self, packed: Pack, lr: float) -> Tensor:
        """Make one supervised step on the tokens that the loss mask selects."""
        mask = torch.from_numpy(packed.loss_mask).to(self.device)
        count = parallel.global_token_count(mask.sum(), self.meshes)
        loss = -self.logprobs(packed)[mask].sum() / count
        loss.backward()
        self.apply_gradients(lr)
        return loss.detach()

    def train(self, groups: Sequence[Group]) -> dict[str, float]:
        """Make one GRPO step. Each rank computes the loss of a share of the rollouts."""
        rewards = torch.tensor([[rollout.reward for rollout in each.rollouts] for each in groups])
        advantages = losses.advantages.group_advantages(rewards.float()).flatten().numpy()
        packed, routes, trees = self.share_of([x for each in groups for x in each.rollouts])
        sampled_logprobs = torch.from_numpy(packed.logprobs).float().to(self.device)
        mask = torch.from_numpy(packed.loss_mask).to(self.device)
        lengths = packed.completion_lengths
        of_tokens = advantages[[*packed.indices]].repeat(lengths)
        sequence_ids = torch.arange(len(lengths)).repeat_interleave(torch.from_numpy(lengths))
        count = parallel.global_token_count(mask.sum(), self.meshes)
        with self.as_in_the_engine(routes) if self.use_replay else nullcontext():
            logprobs = self.logprobs(packed, trees)
            loss = self.loss(
                logprobs,
                sampled_logprobs,
                torch.from_numpy(of_tokens).to(self.device),
                mask=mask,
                sequence_ids=sequence_ids.to(self.device),
            )
            (loss.sum / count).backward()
        norm = self.apply_gradients(self.lr)
        clipped = parallel.global_token_count(loss.clipped, self.meshes)
        rows = len(packed.tokens) if trees is None else len(trees.places)
        read, rows = (
            parallel.global_token_count(each, self.meshes) for each in (len(packed.tokens), rows)
        )
        metrics = losses.corrections.off_policy_metrics(
            logprobs, sampled_logprobs, mask=mask, group=dist.group.WORLD
        )
        return (
            metrics
            | {"tokens": count, "gradient_norm": norm, "clipped": clipped / count}
            | {"positions_computed": rows / read}
        )

    def mismatch(self, rollouts: Sequence[Rollout]) -> tuple[float, float, float]:
        """Return the KL estimate k3 without and with replay, and the share of routes that agree."""
        packed, routes, trees = self.share_of(rollouts)
        with torch.no_grad():
            with replay.record(self.routers) as tape:
                without = self.logprobs(packed, trees)
            with self.as_in_the_engine(routes):
                imposed = self.logprobs(packed, trees)
        agreement = math.nan if routes is None else replay.compare(routes, tape.routes).overall
        parts: list = [None] * self.world_size
        sampled, mask = torch.from_numpy(packed.logprobs), torch.from_numpy(packed.loss_mask)
        mine = without.cpu()[mask], imposed.cpu()[mask], sampled[mask], agreement
        dist.all_gather_object(parts, mine)
        without, imposed, sampled = (torch.cat([part[i] for part in parts]) for i in range(3))
        return (
            replay.measure_mismatch(trainer_logprobs=without, rollout_logprobs=sampled).k3,
            replay.measure_mismatch(trainer_logprobs=imposed, rollout_logprobs=sampled).k3,
            statistics.mean(part[3] for part in parts),
        )

    def share_of(
        self, rollouts: Sequence[Rollout]
    ) -> tuple[Pack, replay.Routes | None, TreePlan | None]:
        """Return this rank's packed rollouts, their routes, and with `use_trees` their trees."""
        packed = pack(rollouts, range(self.rank, len(rollouts), self.world_size))
        if self.use_exact:  # The trainer chooses the same experts by itself.
            return packed, None, None
        shape = replay_vllm.RouterShape.from_config(self.model.config)
        mine = [
            replay_vllm.routes_from_output(
                SimpleNamespace(
                    token_ids=rollouts[i].completion,
                    routed_experts=rollouts[i].attachments.get("routed_experts"),
                ),
                shape,
                prompt_tokens=rollouts[i].prompt_length,
            )
            for i in packed.indices
        ]
        if not self.use_trees:
            return packed, replay.Routes.join(mine), None
        trees = plan_trees(
            [rollouts[i] for i in packed.indices],
            imposed=[each.tensor()[0] for each in mine],
            padding=packed.padding,
        )
        return packed, replay.Routes.join(mine).take(trees.places), trees

    def as_in_the_engine(self, routes: replay.Routes | None) -> AbstractContextManager:
        """Impose the engine's experts. With `use_exact`, compute the engine's exact bits."""
        return batch_invariant() if routes is None else replay.impose(self.routers, routes)

    def publish(self, version: int) -> weightsync.marker.Receipt:
        """Publish this rank's shards of one version, so that the engine can read the shards."""
        return self.publisher.publish(version, timeout_s=TIMEOUT_S)

    def save(self, folder: Path) -> None:
        """Save weights and moments completely or not at all, for loading on any number of ranks."""
        unfinished = folder.with_suffix(".unfinished")
        weights, moments = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=unfinished)
        if self.rank == 0:
            unfinished.rename(folder)

    def load(self, folder: Path) -> None:
        """Load saved weights and moments from a folder."""
        weights, moments = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments
        )

    def logprobs(self, packed: Pack, trees: TreePlan | None = None) -> Tensor:
        """Return the log-probability of each sampled token of a pack, with or without trees."""
        predictors, read, parents = packed.predictors, packed.tokens, None
        lengths = packed.document_lengths
        if trees is not None:
            predictors, read = trees.rows[predictors], read[trees.places]
            lengths, parents = trees.segment_lengths, trees.parents
        places, ids, tokens = (
            torch.from_numpy(each).to(self.device) for each in (predictors, packed.targets, read)
        )
        head = self.model.lm_head
        if self.use_exact:  # Attention and log-probabilities in the engine's order of additions.
            head.forward = lambda hidden: (
                F.linear(hidden[0, places], head.weight).log_softmax(-1).gather(-1, ids[:, None])
            ).clone()
            positions = torch.cat([torch.arange(length) for length in packed.document_lengths])
            found = self.model(tokens[None], position_ids=positions[None], use_cache=False)
            return found.logits[:, 0]
        # Inside the model's forward, FSDP2 has gathered the head's weight. The head returns
        # log-probabilities, so no matrix of logits is stored.
        head.forward = lambda hidden: losses.logprobs.token_logprobs(
            hidden[0, places], head.weight, ids
        ).clone()  # FSDP2 does not accept a view
        sequence = parallel.plan_sequence(lengths, ranks=1, parents=parents)
        group = self.meshes.context.get_group()
        return self.model(**local_inputs(tokens, sequence=sequence, group=group)).logits

    def apply_gradients(self, lr: float) -> float:
        norm = parallel.clip_grad_norm_(
            self.model.parameters(), 1.0, meshes=self.meshes, optimizer=self.optimizer
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def close(self) -> None:
        self.publisher.close()
        self.transport.close()


def on_all_ranks(trainer: Trainer, method: str, *args):
    """Call a method of the trainer on rank 0, and on all ranks that run `follow`."""
    if trainer.device.type == "cuda":  # `asyncio.to_thread` calls this in new threads.
        torch.cuda.set_device(trainer.device)
    dist.broadcast_object_list([(method, args)], src=0)
    return getattr(trainer, method)(*args)


def follow(trainer: Trainer) -> None:
    """Repeat the calls of rank 0 on another rank, until rank 0 closes its trainer."""
    method = ""
    while method != "close":
        message: list = [None]
        dist.broadcast_object_list(message, src=0)
        method, args = message[0]
        getattr(trainer, method)(*args)


def demonstration(text: str, answer: str) -> Rollout:
    """Return a demonstration as a rollout, with log-probabilities of 0."""
    prompt, completion = prompt_of(text), answer_of(answer)
    return Rollout(
        tokens=np.array(prompt + completion),
        prompt_length=len(prompt),
        logprobs=np.zeros(len(completion)),
        versions=np.zeros(len(completion), int),
        finish_reason="stop",
    )
