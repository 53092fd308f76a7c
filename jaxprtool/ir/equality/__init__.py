"""When programs, equations and parameters are equal, and keys that are equal if they are."""
