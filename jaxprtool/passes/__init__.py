"""Rewrites of programs: the framework of passes and pipelines, and the passes, by purpose."""
