"""The parts of `hotswap bench transfer` that need real instances: a late joiner, and what serving loses while it feeds.

site    hosts on this machine: each a name, an arena and processes of its own; the one that holds the version and serves
joiner  from the start of an instance on a host that holds nothing to its first token, beside a start from disk
reader  a host that reads the version again and again, in a process of its own
loss    tokens/s of the serving instance with and without that reader
"""
