"""Verb 4: train. `step` is one train step over any trainer; `local` is the trainer of one process."""
