"""Rules for writing the equations of each primitive; each module adds to `table.python_rules`."""
