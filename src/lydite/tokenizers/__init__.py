"""Text to token ids, from the files of a checkpoint; without MLX."""
