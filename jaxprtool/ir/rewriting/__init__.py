"""Rewriting jaxprs: equations, constants, custom derivative rules, callbacks."""
