"""Engines that run a model inside of `batch_invariant()`, one file for each package."""
