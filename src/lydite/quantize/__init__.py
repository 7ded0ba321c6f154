"""Weights of a network in few bits: formats per layer, calibrated methods, export with a report."""
