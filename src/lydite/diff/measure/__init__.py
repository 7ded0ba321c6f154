"""How far two paired values are apart, and how far rounding alone may put them apart."""
