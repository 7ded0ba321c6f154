"""Two traces held against each other: gates, pairing, noise floor, first divergence, findings."""
