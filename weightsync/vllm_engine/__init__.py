"""The vLLM side of the checkpoint engine: stage a version while decoding goes on, commit it between two batches.

    backend.py     the weight-transfer engine vLLM creates in each worker, and the worker methods we call
    stager.py      one background thread: verify, load, build; never touches the live model
    skeleton.py    a second, weightless copy of the model whose own loaders place checkpoint tensors
    kernels.py     which linear kernel runs a layer, and the layout it wants
    layout.py      where each kernel tensor of a version lies in a layout slot
    places.py      where a slot is on this worker's host, if the workers are on several
    tether.py      the connection by which such a worker and its leader notice each other's end
    pool.py        layout slots in shared memory: built once per host, mapped by every instance
    generation.py  one version, ready to run: what a commit flips to, and back
    exchange.py    the same on an accelerator, where contents change and addresses stay
    core.py        additions to vLLM's engine core: the atomic commit, version labels, cache namespaces

Written against vLLM 0.32.0; `tests/weightsync/test_vllm_contract.py` names every private name used here.
"""

VLLM_VERSION = "0.32.0"
