"""Running of functions in their own processes."""
