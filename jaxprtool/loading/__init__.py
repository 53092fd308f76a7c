"""Loading of a Program from a TARGET and its arguments."""
