"""The vLLM side of the checkpoint engine: stage a version while decoding goes on, commit it between two batches.

    backend.py    the weight-transfer engine vLLM creates in each worker, and the worker methods we call
    staging/      a version is built beside the one that runs: the base model, and its parts
    device/       where versions wait for their commit, and how it flips to them: on a CPU, on an accelerator
    model/        where each published tensor goes in the model, by vLLM's own code
    engine_core/  additions to vLLM's engine core: the commit between two batches, and what it does to requests
    loader.py     what an instance runs until it has its first version
    tether.py     the connection by which a worker on another host and its leader notice each other's end
    kernels.py    the kind of this CPU, and the library of kernels that vLLM has loaded for it
    releases.py   the releases of vLLM that all this is written against, and where they differ
    gpus.py       the GPUs of this host, found without CUDA

Of the folders, staging/ imports device/ and model/, and device/ imports model/; engine_core/ knows none of them.
`tests/contract/test_vllm.py` names every private name of vLLM that is used here.
"""

VLLM_VERSIONS = ("0.32.0", "0.33.0")  # oldest first
