"""`python -m loadtest.rl_step`."""

from loadtest.rl_step.bench import main

main()
