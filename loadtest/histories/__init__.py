"""A run as its clients and the store saw it, in a file, and the rules that are checked over it afterwards.

rules       what the records of a model may become; simulated stores are held to them, too
recorder    writes a history: the records of a store, and the requests of clients
requests    what came of a request, read from the bytes of its answer
check       `python -m loadtest.histories FILE...`: which lines of a history contradict the rules
"""
