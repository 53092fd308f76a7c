"""The test suite; `tests.programs` gives every test its inputs and its referee."""
