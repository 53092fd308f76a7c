"""All small programs over families of primitives, and their values.

    from tests.programs.enumerated.families import FAMILIES
    from tests.programs.enumerated.evaluation import Values

A family yields its programs unit by unit. Shared parts are built and evaluated once.
"""
