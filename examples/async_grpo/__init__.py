"""Parts of four examples, which you change for another task or another engine.

The examples are `async_grpo_moe.py`, `ray_async_grpo.py`, `reasoning_gym_grpo.py` and
`trl_async_grpo.py`.
"""
