"""The page of `lydite diff --html`."""
