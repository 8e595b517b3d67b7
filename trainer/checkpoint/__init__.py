"""Checkpoints: a directory is whole, or it is not used. Threads write it while training goes on.

checkpoints.py   a run's checkpoints: taken, written, resumed from      directory.py   files only: whole directories
engine_state.py  what of the engine is saved, and how it is restored    shards.py      tensors, by rank
fsdp.py          the same for a fully sharded model                     parts.py       the rest: buffer, cursor, guards
rank_files.py    what a rank tells rank 0 that it wrote, and its thread
"""
