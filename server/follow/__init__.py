"""`hotswap follow`: new checkpoints of a directory, an object store or a model registry become versions.

sources.py   what a place holds, and how a checkpoint is fetched from it and verified
registry.py  a registered model of MLflow, whose alias is followed
versions.py  versions in a bucket, as deltas
state.py     what was tried, and what is under way: a file that outlives the process
loop.py      the next thing to do, with the admin port alone, and its metrics
"""
