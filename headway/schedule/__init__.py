"""The schedule: a ledger of what has happened, pure rules of what may happen now, and the loop that asks them.

Nothing here knows tensors, engines or whether time is real: the loop drives the contracts of `headway.stages`.
"""
