"""Ports by people who had not read the comparison code, with planted bugs."""
