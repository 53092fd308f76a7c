"""How the equations of each primitive are written; every module here fills `table.python_rules`."""
