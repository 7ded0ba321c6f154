"""`mlx.nn` modules: config in, arrays out. Arithmetic only; names follow diffusers."""
