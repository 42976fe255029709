"""Learning curves: the sigmoid of ScaleRL fitted to them, with what the points can and can't say of it.

Nothing is imported here, so that `headway.scaling.result` can be read without numpy.
"""
