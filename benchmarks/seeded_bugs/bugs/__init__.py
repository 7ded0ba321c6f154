"""The seeded bugs, by the part of a port they are in."""
