"""The training API: a server of the Tinker protocol, which the stock `tinker` SDK trains with, and of fine-tuning jobs.

`python -m trainer.api --config FILE` runs it. Imports run downward in this list:

__main__.py  the command line
finetuning/  jobs that train by themselves, for the openai SDK
app.py       the routes
service.py   what a request does: sessions, training clients, checkpoints, samplers
queue.py     the requests of each training client, one after the other, once each
sampling.py  answers and log-probs from the gateway, by snapshots of adapters
tenants.py   what clients train on one base model: losses, gradients, Adam
losses.py    the losses by name
states.py    what a client trains, on disk
journal.py   what survives a crash
wire.py      the bodies of requests and answers
config.py    the configuration
errors.py    what a client is told
"""
