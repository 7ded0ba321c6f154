"""The operation computed again from recorded values, in every known variant.

A cause is named only when one variant gives the reference's value and another one the port's, both
up to rounding. So a value that was computed from something else names nothing.
"""
