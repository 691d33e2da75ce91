"""Measurements and benchmarks, with the prompts they use."""
