"""`hotswap follow`: new checkpoints of a directory or an object store become versions.

sources.py   what a place holds, and how a checkpoint is fetched from it and verified
state.py     what was tried, and what is under way: a file that outlives the process
loop.py      the next thing to do, with the admin port alone
"""
