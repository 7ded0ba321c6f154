"""Calibration sets: samples of a run on disk, durable, verifiable, repairable."""
