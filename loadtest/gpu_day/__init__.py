"""Checks of swaps that only a GPU can settle, in phases of minutes: `python -m loadtest.gpu_day`; docs/gpu.md.

    __main__.py    the command
    calls.py       the schedule, and what runs it: phases in forks, each with a limit
    report.py      checks: one JSON line each, and a file of all of them
    device.py      CUDA or a CPU: streams, events, graphs, times
    stack.py       a model of plain layers in Llama's shape, and the values that a version gives it
    engine.py      what is used of weightsync.vllm_engine, without vLLM
    hardware.py    `env`, `remap`: what the machine has, and what its mappings cost
    flips.py       `flip`, `tied`, `undo`, `race`: what a commit does to weights that a graph reads
    stagings.py    `memory`, `stage`, `checksum`: what a staging takes of the device's memory and of the steps beside it
    models.py      checkpoints of the phases with vLLM
    serving.py     `serve-small`, `serve-8b`, `serve-fp8`: engines that are swapped, against stock ones
    vllm_process.py  one vLLM engine in a process of its own, stock or swapped
    streams.py     `streams-small`, `streams-8b`: a whole server under streams
    pack/          what a machine without a network needs to run this

Every phase runs on a CPU as well, on tiny shapes: it checks the phase then, and says nothing of a GPU.
"""
