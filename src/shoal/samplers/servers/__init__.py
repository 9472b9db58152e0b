"""Servers that are asked over HTTP."""
