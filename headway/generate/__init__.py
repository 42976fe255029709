"""Verb 1: generate. `episode` turns a ticket into a rollout; engines sample tokens."""
