"""Versions as lossless differences, and publishing them from another host."""
