"""The probe: where do an engine's probabilities differ from the trainer's, and by how much?

Answers are sampled as an engine would with one thing done otherwise than the trainer does it, then scored by the
trainer; once for each such thing. What is told of them is in `docs/mismatch.md`.
"""
