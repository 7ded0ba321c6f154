"""Judge anybody's sampler or schedule without a network: problems, replays, verdicts."""
