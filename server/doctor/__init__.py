"""`hotswap doctor`: what this host lacks, or has wrongly, to run what is asked of it, and how to mend each.

    finding.py   what a check says            world.py    what it looks at
    registry.py  the list of checks           report.py   all of them, run and shown
    checks/      one file for each subject; a file that is put there is found

Nothing here changes anything: a store is written to under a lease that is revoked at once, a port is tried and closed.
"""
