"""The peer of a host: it carries versions between this host and others.

service.py     the peer: follows the records, offers, fetches the most urgent slot, and announces accordingly
copies.py      the records: who has which slot, which slots a host wants, where they are here; writes this host's
slices.py      what the instances of a host need of a version, if that is not everything
shelf.py       what this host has: published slots, fetched copies, their journals
fetch.py       fetches one slot: from holders, chunk by chunk, resumed, checked
holders.py     the hosts that a fetch reads from, and when to open or leave one
plan.py        which chunk is read from which holder
serve.py       what this host serves: slots are offered, tickets admit readers
control.py     both ends of the control channel; messages.py has what they say
chunks.py      a slot as chunks, and the bitmap of those that a host has

`hotswap peer` is __main__.py. docs/peers.md tells the whole story.
"""
