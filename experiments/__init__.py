"""Experiments: each runs several whole training runs and leaves a page that shows them side by side."""
