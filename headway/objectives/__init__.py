"""Objectives: pure functions on tensors, and compositions of them described as data.

Nothing is imported here, so that `headway.objectives.named` can be read without torch.
"""
