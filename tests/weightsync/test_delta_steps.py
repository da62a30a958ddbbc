"""Deltas of real optimizer steps: bit for bit, and how many bytes."""

import numpy as np
import torch
from torch import nn

from primeblocks import fp8
from primeblocks.weightsync.delta.deltas import apply_delta, encode_delta
from tests.weightsync.test_delta import bits, same


class Steps:
    """A small model under AdamW: noisy gradients, lr 1e-6, as RL has them."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        shapes = [(384, 256), (256, 384), (256, 256), (128, 256)]
        self.inputs = torch.randn(64, 256, generator=generator)
        self.parameters = [
            nn.Parameter(torch.randn(shape, generator=generator) * 0.02) for shape in shapes
        ]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-6, fused=True)
        self.generator = generator

    def step(self):
        up, down, mix, out = self.parameters
        x = self.inputs[torch.randint(0, 64, (16,), generator=self.generator)]
        x = x + torch.relu(x @ up.t()) @ down.t()
        logits = torch.tanh(x @ mix.t()) @ out.t()
        chosen = torch.randint(0, 128, (16,), generator=self.generator)
        advantages = torch.randn(16, generator=self.generator)
        logprobs = logits.log_softmax(-1)[torch.arange(16), chosen]
        (-(advantages * logprobs).mean()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def export(self):
        return torch.cat([one.detach().to(torch.bfloat16).view(-1) for one in self.parameters])

    def export_fp8(self):
        """Codes and scales of the matrices that the engine would hold."""
        found = [fp8.quantize(one.detach(), fp8.Tile(128, 128)) for one in self.parameters]
        codes = torch.cat([one.codes.reshape(-1) for one in found])
        return codes, torch.cat([one.scales.reshape(-1) for one in found])


def information_bytes(new, old):
    """Of independent elements that each move by some number of steps: no coder does better."""
    kind = np.int16 if new.itemsize == 2 else np.int8
    moves = bits(new).numpy().view(kind) - bits(old).numpy().view(kind)
    _, counts = np.unique(moves, return_counts=True)
    shares = counts / counts.sum()
    return -(counts * np.log2(shares)).sum() / 8


def sync(new, held, kept):
    """Send `new` to a receiver that holds `held`; bytes sent, and what they were."""
    delta = encode_delta(new, kept)
    if delta is None:
        held.copy_(new)
        kept.copy_(new)
        return new.nbytes, None
    apply_delta(held, delta)
    apply_delta(kept, delta)
    return len(delta), delta


def test_adamw_steps_in_bf16(full):
    trainer = Steps()
    kept = trainer.export()
    held, late = kept.clone(), kept.clone()
    sent, changed, least, missed = 0, 0, 0.0, []
    steps = 200 if full else 40
    for step in range(steps):
        trainer.step()
        new = trainer.export()
        least += information_bytes(new, kept)
        changed += 2 * int((new != kept).sum())
        size, delta = sync(new, held, kept)
        sent += size
        missed.append(delta)
        assert same(held, new)
        assert same(kept, new)
        if step % 40 == 39:  # A receiver that comes by every 40 versions.
            for delta in missed:
                apply_delta(late, delta)
            assert same(late, new)
            missed = []
    whole = steps * kept.nbytes
    print(f"changed {changed / whole:.4f}, sent {sent / whole:.5f}, entropy {least / whole:.5f}")
    assert 0.002 < changed / whole < 0.03
    assert sent <= 0.013 * whole
    assert sent <= 1.6 * least


def test_adamw_steps_in_fp8(full):
    trainer = Steps()
    kept = trainer.export_fp8()
    held = [one.clone() for one in kept]
    sent, least = 0, 0.0
    steps = 200 if full else 40
    for _ in range(steps):
        trainer.step()
        new = trainer.export_fp8()
        least += information_bytes(new[0], kept[0])
        for part, there, before in zip(new, held, kept, strict=True):
            sent += sync(part, there, before)[0]
            assert same(there, part)
    whole = steps * sum(part.nbytes for part in held)
    print(f"fp8: sent {sent / whole:.5f}, entropy of the codes {least / whole:.5f}")
    assert 0.0001 * whole < least < sent <= 0.013 * whole
