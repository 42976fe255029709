"""Verb 5: sync. How new weights reach the engines."""
