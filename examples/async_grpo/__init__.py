"""Parts of `async_grpo_moe.py`. Change these files for another task or another engine."""
