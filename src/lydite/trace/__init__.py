"""Traces: what one run of one model leaves on disk, and how it is captured."""
