"""The samplers; `lydite.sampling.registry` finds one by its name."""
