"""The device: where versions wait for their commit, how they get there, and how a commit flips to them.

generation.py  one version, ready to run: what a commit flips to, and back; what a device must do for that
pacing.py      how a staging shares the machine with decoding
cpu.py         on a CPU: versions in shared memory, commits by pointers
pool.py        layout slots in shared memory: built once per host, mapped by every instance
cuda.py        on an accelerator: buffers, pinned memory, commits by copies
remap.py       the same without copies: other memory is mapped at the addresses of the live weights
mapping.py     handles, addresses and the driver for that
"""
