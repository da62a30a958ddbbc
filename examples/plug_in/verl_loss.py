"""Plug a loss into verl 0.9.1, where `policy_loss.loss_mode` selects the loss by name.

The import of this module registers the loss. Every worker of verl imports this module if you set
`actor_rollout_ref.model.external_lib=verl_loss` and add the folder `plug_in` to PYTHONPATH.
"""

from verl.trainer.ppo.core_algos import register_policy_loss

from primeblocks import losses

__all__ = ["NAME"]

NAME = "primeblocks"


# glue
@register_policy_loss(NAME)
def policy_loss(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
):
    mask, batch = response_mask.bool(), config.global_batch_info
    loss = losses.grpo_loss(
        log_prob, old_log_prob, advantages, mask=mask, weights=rollout_is_weights,
        clip_low=config.clip_ratio_low, clip_high=config.clip_ratio_high,
        max_ratio=config.clip_ratio_c,
    )  # fmt: skip
    if loss_agg_mode != "token-mean":
        raise ValueError(f"loss_agg_mode={loss_agg_mode!r}: this loss divides by tokens only")
    tokens = batch.get("batch_num_tokens") or loss.tokens  # Of all ranks and micro-batches.
    value = losses.normalisation.divide(loss, by=int(tokens)) * batch.get("dp_size", 1)
    return value, {"actor/clipped": loss.clipped / max(loss.tokens, 1)}


# end of glue
