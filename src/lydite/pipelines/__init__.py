"""Text to image: the one place where models, weights and sampling meet."""
