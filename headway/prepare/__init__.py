"""Verb 3: prepare. `credit` turns rewards into advantages, `pack` turns rollouts into micro-batches without padding."""
