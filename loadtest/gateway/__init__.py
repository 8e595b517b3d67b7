"""`hotswap bench gateway`: this gateway beside other routers, in front of the same fast upstream.

bench       the benchmark, contender by contender
against     this gateway and that of another checkout, in pairs
contenders  how each is started, on which core, and what it is asked
measure     one load, and its figures
cancel      how soon an upstream hears that a client went away
prefix_knowledge  a simulation: what gateways would gain by knowing every prefix cache
splice      a proxy that only passes bytes on: the least that any gateway costs
report      medians, spread and targets; `markdown` makes the tables of them
native/     the client and the upstream, in C
"""
