"""The Python API of jaxprtool."""
