"""Before a run: what a layout needs of each GPU, and which layout to choose. Needs no GPU, and no weights."""

from trainer.plan.estimate import Estimate, Workload, estimate
from trainer.plan.recommend import Choice, Hardware, recommend
from trainer.plan.report import PlanOptions, print_plan

__all__ = ["Choice", "Estimate", "Hardware", "PlanOptions", "Workload", "estimate", "print_plan", "recommend"]
