"""Hugging Face causal language models as policies: one attention function and one distribution for everyone.

Engine and trainer load the same architecture through `policy.load_policy`, attend through `attention` and compute
every log-prob through `distribution`; what they may differ in is their storage, their dtype, and nothing else.
"""
