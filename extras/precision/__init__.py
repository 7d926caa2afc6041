"""Another arithmetic: --dtype float16. The seam: `update.make_guard`."""
