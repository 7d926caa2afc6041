"""Optional parts, found by name when a flag, a row or a model asks for them. This folder may be deleted."""
