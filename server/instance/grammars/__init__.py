"""Structured output is bounded before vLLM compiles it: by what it spells out, then by a trial in a process apart.

bounds     limits on length, depth and repetitions; linear in the length
trials     the trial compilations of one instance: the helper process, its queue in which each API key has its share,
           the verdicts it has given
helper     that process; it forks a child with limits for each trial, and imports neither vLLM nor this project
backend    what vLLM would compile, with which library and which tokenizer
engine     in the engine: each grammar is compiled with the library that vLLM chose for its request
guard      the hooks in the engine's client and in vLLM's parsers
"""
