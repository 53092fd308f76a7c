"""All small programs over families of primitives, and their values.

    from tests.programs.enumerated.families import FAMILIES
    from tests.programs.enumerated.evaluation import Values

A family gives its programs unit by unit; what they have in common is made, and evaluated, once.
"""
