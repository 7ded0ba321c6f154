"""Compare two traces: gates, pairing, rounding, first divergence, findings."""
