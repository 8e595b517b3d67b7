"""One GRPO step, by whom and how: our three schedules and TRL's GRPOTrainer on the same model, batch and task."""
