"""Engines that multiply and quantize, and hosts whose modules are converted."""
