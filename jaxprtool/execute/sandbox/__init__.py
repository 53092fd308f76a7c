"""Running a function in a process of its own."""
