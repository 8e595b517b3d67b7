"""`hotswap bench upgrade`: every gateway and instance replaced one by one under load, as the chart in k8s/ does it.

service  what a Kubernetes Service does: which gateway a new connection goes to
clients  the load, in a process of its own: every request is counted, every token checked
pods     gateways and instances as processes, started, probed and ended as the chart says
swaps    weights that change in the middle of it
bench    the upgrade, step by step, and its report
"""
