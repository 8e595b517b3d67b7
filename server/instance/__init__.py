"""The vLLM sidecar: one process embeds one vLLM engine, serves its OpenAI routes to gateways, swaps its weights.

main.py        start-up and shutdown of the process
fork_server.py where vLLM's processes come from
config.py      what can be set, and which of vLLM's options are refused
engine.py      the engine, the swap calls into it, and its adapters
hosts.py       one instance on several ranks and hosts
sidecar.py     the participant in swap transactions: stages, flips, reports through the store
rest.py        how the process sleeps
middleware.py  who may ask, and what is written into the answers
requests.py    what one request may bring
generate.py    POST /generate
provenance.py  which weights wrote which token, on every route
routed_experts.py  which experts tokens went to, where a request asks
replay.py      streams that another instance can go on with
inflight.py    who is generating here, and which of them a flip has to wait for
media.py       how images and the like are fetched
openapi.py     the routes as an OpenAPI document
grammars/      structured output: bounds, trials in another process, and what the engine adds
"""
