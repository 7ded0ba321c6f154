"""The story `lydite demo` tells on the model inside the package: one chapter per file."""
