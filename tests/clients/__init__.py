"""Clients of other projects, unmodified, against a server whose weights are swapped under them."""
