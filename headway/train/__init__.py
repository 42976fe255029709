"""Verb 4: train. `step` is one train step over any trainer and critic.

`local` and `critic` are those of one process, and `optimizer` what each of them has of its own.
"""
