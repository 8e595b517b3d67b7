"""A run's report, made from its metrics file: `hotswap train --config FILE --report`, or `python -m trainer.report`."""

from trainer.report.events import RunEvents, read_events
from trainer.report.write import write_report

__all__ = ["RunEvents", "read_events", "write_report"]
