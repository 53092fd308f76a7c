"""Running a program on a backend: devices, arguments, compilation, times."""
