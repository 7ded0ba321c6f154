"""Seeded bugs: what a tool that compares a port with its reference is scored on.

Every bug is a context manager that patches a live pipeline from outside and restores it. The
classes of bugs are in docs/bug-classes.md; benchmarks/score_seeded_bugs.py computes the scores.
"""
