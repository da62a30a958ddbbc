"""The files of `async_grpo_moe.py` that you change for another task or another engine."""
