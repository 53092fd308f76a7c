"""The test suite. `tests.programs` has the programs that tests use, and checks of results."""
