"""Ground floor: errors, configs, dtypes, names, files. NumPy and the standard library only."""
