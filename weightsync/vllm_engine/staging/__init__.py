"""Staging: a version is built beside the one that runs, and becomes what a commit flips to.

bundle.py         one version in a worker: the base model and its parts, and where their slots are on this host
bundle_stager.py  stages the parts of a version, one after the other
stager.py         one background thread: verify, load, build; never touches the live model
build.py          fills a layout slot from a published one
published.py      a published slot as it is read for that: each byte digested once
sums.py           checksums of what was built, in terms of what was published
lora.py           adapters: built beside the running ones, replaced between two batches
"""
