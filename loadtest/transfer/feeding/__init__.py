"""The parts of `hotswap bench transfer` that need real instances: a late joiner, and what serving loses while it feeds.

site    hosts on this machine: each a name, an arena and processes of its own; the one that holds the version and serves
bench   from a late instance's start to its first token, beside a start from disk; tokens/s with and without a reader
reader  a host that reads the version again and again, in a process of its own
"""
