"""What every pass stands on: the Program, its structured views, and rewriting."""
