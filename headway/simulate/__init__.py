"""Doubles of the five verbs for virtual time: what takes how long, and nothing else.

The loop, the ledger and the rules are those of a real run; `headway/schedule/` has no branch that knows.
"""
