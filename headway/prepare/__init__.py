"""Verb 3: prepare. Scored rollouts become a batch that is ready to train.

`credit` puts them in order and says which are data, `pack` lays them out in micro-batches without padding, `record`
runs the forward passes whose results the objective needs before the first update, `prepare` joins them into a batch,
and `canary` scores the rollouts that show numerics alone.
"""
