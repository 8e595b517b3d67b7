"""`hotswap doctor`: what this host lacks, or has wrongly, to run what is asked of it, and how to mend each.

    registry.py  what a check says, and the list of checks, which it runs
    world.py     what checks look at; processes.py and each file of checks/ may lack a package, and the others go on
    checks/      the checks by subject; a file that is put there is found

Nothing here changes anything: a store is written to under a lease that is revoked at once, a port is tried and closed.
"""
