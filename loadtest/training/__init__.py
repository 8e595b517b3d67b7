"""The cost of training, and whether it learns.

learning/         held-out accuracy by step, for every algorithm: `hotswap bench learning`
rl_step/          one GRPO step under each schedule, and TRL's
partial_rollouts  steps with and without a budget of tokens, where a few answers are very long
phase_switch      what a trainer and a server that share their memory by turns lose in time, and gain in memory
logprobs          the memory and the time of a step's output layer
"""
