"""The Python face of jaxprtool: what users call, built on every room below."""
