"""Comparing, bisecting, verifying and reducing programs, and what a gradient keeps."""
