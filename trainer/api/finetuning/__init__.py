"""Fine-tuning jobs, as the openai SDK asks for them. Imports run downward:

routes.py    the routes under /v1
models.py    models by name: what a job has trained, answered by the running server
jobs.py      the jobs: what they are asked for, what state they are in, whose turn it is
run.py       one job's requests to the training API, one after the other
steps.py     which examples a step takes, and the gradient of their loss
files.py     uploaded files and results
examples.py  the lines of a file: what is wrong with them, and their tokens
"""
