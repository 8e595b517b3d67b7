"""From records to the samples of a step. Imports run downward in this list:

experience.py  groups in, the tensors of a step out
schedules.py   which groups a step trains on, and what is sampled meanwhile
feed.py        which record comes next
sampling.py    records in, scored trajectories out, on a thread of its own
generate.py    the client of `/generate`
"""
