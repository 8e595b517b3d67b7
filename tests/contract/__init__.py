"""Contracts with other projects, and nothing else: their client classes out of their own packages, their routes, and
the names of theirs that this project relies on. Each project has one file; `make contract` runs them alone."""
