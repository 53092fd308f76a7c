"""Observation of pipelines: `pipeline.run(program, observer)` calls an `Observer` at each step."""

from jaxprtool.passes.framework.pipeline import Observer, Step

__all__ = ["Observer", "Step"]
