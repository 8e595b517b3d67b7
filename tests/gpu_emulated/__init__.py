"""A GPU that is emulated: `make gpu-emulated`, docs/testing.md.

`standin/` is C in place of CUDA's runtime, its driver and NVML. `operators.py` computes torch's operators over its
memory, `standin.py` sets it up and asks it, and `forks.py` runs each test in a process of its own. `worker.py` has what
a vLLM worker has, without an engine around it; `kinds.py` makes the checkpoints. `ranks.py` runs ranks of the trainer,
and `kernels.py` has what only CUDA has a kernel for.
"""
