"""Which wrong value is the bug."""
