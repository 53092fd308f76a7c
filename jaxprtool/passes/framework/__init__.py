"""Passes and pipelines: their base class, registry, options and tracing."""
