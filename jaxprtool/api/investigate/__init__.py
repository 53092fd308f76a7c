"""Comparing, bisecting, verifying and reducing programs, and the residuals of gradients."""
