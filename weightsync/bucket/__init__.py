"""Versions in an object store, for a trainer and fleets that share no network: any URL of fsspec's.

PREFIX/versions/000000000012.json      the record of version 12, written last, with its own digest in the first line
PREFIX/data/000000000012-UPLOAD/00000  the blocks of its delta or of all of it (publish/delta.py) in objects of some MiB

objects.py    the bucket, its records, what is kept    publisher.py  the trainer's side    reader.py   the fleet's side
carrier.py    out of slots, in a process of its own    metrics.py    of publishers         __main__.py a checkpoint

A number is claimed by creating its record where there is none yet: a conditional put in S3 (`If-None-Match`), exclusive
creation elsewhere. So of two publishers that believe to come next one has the number, and the other learns of it. No
record names the objects left by a killed publisher, so no follower reads them, and the next publisher removes them.

A version is one part of the model, the base model or another (control/parts.py); its record says which versions have
the others. Versions are deltas of the one before of their part, and each so many come in full: a fleet need not begin
at the first one.
"""
