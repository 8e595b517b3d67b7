"""vLLM and Hotswap's packages for a machine with one GPU and without a network: `python -m loadtest.gpu_day.pack DIR`.

__main__.py    downloads wheels, thins them out, and writes archives in parts with their digests
fatbin.py      machine code of other GPUs in a shared library, blanked
unpack.py      goes into the pack: checks the parts, unpacks them, and runs the day
packages.txt   what is packed besides vLLM
"""
