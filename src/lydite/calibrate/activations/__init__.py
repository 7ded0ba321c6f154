"""Statistics of a network's activations over a calibration set."""
