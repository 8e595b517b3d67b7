"""The vLLM sidecar: one process embeds one vLLM engine, serves its OpenAI routes to gateways, swaps its weights.

main.py        start-up and shutdown of the process
options.py     vLLM's options: its own parser, and those that are refused here
engine.py      the engine, and the swap calls into it
sidecar.py     the participant in swap transactions: stages, flips, reports through the store
generate.py    POST /generate
provenance.py  which weights wrote which token, on every route
inflight.py    who is generating here, and which of them a flip has to wait for
config.py      what can be set
"""
