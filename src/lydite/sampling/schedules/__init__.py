"""The schedules; `lydite.sampling.registry` finds one by its name."""
