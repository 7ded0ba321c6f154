"""Which value of the port belongs to which value of the reference."""
