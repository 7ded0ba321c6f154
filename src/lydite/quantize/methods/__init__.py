"""How weights are rounded: one method a file, each with the paper it is from."""
