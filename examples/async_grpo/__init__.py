"""The parts of `async_grpo_moe.py` that another task or another engine would change."""
