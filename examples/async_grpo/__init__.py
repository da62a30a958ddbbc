"""Modules that four examples share. Change these modules for your own task or engine.

The examples are `async_grpo_moe.py`, `ray_async_grpo.py`, `reasoning_gym_grpo.py` and
`trl_async_grpo.py`.
"""
