"""The other side of a comparison: diffusers on torch, an optional extra, imported when used."""
