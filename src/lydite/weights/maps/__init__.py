"""One table per network: from the names in a checkpoint to the names of the model."""
