"""Results to one HTML page that needs nothing beside it. Neither MLX nor torch is imported here."""
