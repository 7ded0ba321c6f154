"""Schedules, samplers, prediction types, guidance and noise, for arrays of any library.

Nothing here imports MLX or torch: arrays arrive as arguments and stand left of the operator,
because `np.float64(0.5) * mx_array` is quietly a NumPy array.
"""
