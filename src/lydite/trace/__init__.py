"""Traces: the recorded values of one run of one model."""
