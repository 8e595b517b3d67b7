"""What other projects rely on, and nothing else: their client classes out of their own packages, their routes, and the
names of theirs that this project relies on. One file for each project; `make contract` runs them alone."""
