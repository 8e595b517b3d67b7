"""`python -m loadtest.training.rl_step`."""

from loadtest.training.rl_step.bench import main

main()
