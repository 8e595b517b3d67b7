"""The model as a version must fit it: where each published tensor goes, and in which form its kernels read it.

placement.py   a second, weightless copy of the model (the twin), and what its loaders put where
processing.py  layers that vLLM processes after loading: what that makes, and how the running ones get it
moves.py       of those, layers whose words are only put into another order: filled without vLLM
linear.py      which kernel multiplies by an unquantised matrix, and in which order it reads that
layout.py      where each kernel tensor lies in a layout slot
"""
