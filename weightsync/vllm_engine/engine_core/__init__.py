"""Additions to vLLM's engine core, and to what it drives: requests, their caches and their steps over commits.

core.py      the atomic commit, version labels, zeroed blocks
requests.py  what a commit does to requests in flight: policies, cache namespaces, replays
sessions.py  conversations that keep their KV cache over swaps
prefixes.py  which prefixes of prompts the KV cache holds, by vLLM's KV events
routing.py   the experts that tokens went to, recorded by vLLM, on a CPU and over commits
steps.py     the one step at which data-parallel ranks flip that share experts
seeds.py     requests with a seed, and prompts in chunks, on a CPU
"""
