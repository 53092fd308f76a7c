"""Rendering of Programs and analyses as text, HTML and JSON; no analysis is done here."""
