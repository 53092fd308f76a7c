"""Results of analyses and runs as tables, pictures and JSON."""
