"""Running of Programs on a backend."""
