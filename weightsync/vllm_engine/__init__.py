"""The vLLM side of the checkpoint engine: stage a version while decoding goes on, commit it between two batches.

    backend.py        the weight-transfer engine vLLM creates in each worker, and the worker methods we call
    bundle.py         one version in a worker: the base model and its parts, and where their slots are on this host
    bundle_stager.py  stages the parts of a version, one after the other
    stager.py         one background thread: verify, load, build; never touches the live model
    loader.py         what an instance runs until it has its first version
    placement.py      a second, weightless copy of the model (the twin), and what its loaders put where
    processing.py     layers that vLLM processes after loading: what that makes, and how the running ones get it
    moves.py          of those, layers whose words are only put into another order: filled without vLLM
    linear.py         which kernel multiplies by an unquantised matrix, and in which order it reads that
    layout.py         where each kernel tensor lies in a layout slot
    build.py          fills a layout slot from a published one
    published.py      a published slot as it is read for that: each byte digested once
    sums.py           checksums of what was built, in terms of what was published
    pool.py           layout slots in shared memory: built once per host, mapped by every instance
    generation.py     one version, ready to run: what a commit flips to, and back
    cpu.py            staging on a CPU: versions in shared memory, commits by pointers
    cuda.py           staging on an accelerator: buffers, pinned memory, commits by copies
    remap.py          the same without copies: other memory is mapped at the addresses of the live weights
    mapping.py        handles, addresses and the driver for that
    lora.py           adapters: built beside the running ones, replaced between two batches
    core.py           additions to vLLM's engine core: the atomic commit, version labels, zeroed blocks
    seeds.py          requests with a seed, and prompts in chunks, on a CPU
    routing.py        the experts that tokens went to, recorded by vLLM, on a CPU and over commits
    requests.py       what a commit does to requests in flight: policies, cache namespaces, replays
    tether.py         the connection by which a worker on another host and its leader notice each other's end
    releases.py       the releases of vLLM that all this is written against, and where they differ

`tests/weightsync/vllm_engine/test_contract.py` names every private name of vLLM that is used here.
"""

VLLM_VERSIONS = ("0.32.0", "0.33.0")  # oldest first
