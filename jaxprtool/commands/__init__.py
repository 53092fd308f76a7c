"""The commands, one chapter each: a computation, its table, and what the command line does."""
