"""`lydite demo` on the model inside the package: one chapter of its page per file."""
