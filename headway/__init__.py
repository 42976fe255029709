"""Reinforcement learning for language models, with generation running ahead of training by a bounded distance."""

__version__ = "0.1.0"
