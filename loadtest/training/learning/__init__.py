"""Whether the algorithms learn: `bench` runs them, `recipes` says what on and how, `tools` is the task that takes a
tool, `pages` makes the table and the chart."""
