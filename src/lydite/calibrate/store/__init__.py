"""A calibration set on disk: shards, set.json, one writer, any number of readers."""
