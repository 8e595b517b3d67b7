"""`hotswap bench upgrade`: every gateway and instance replaced one by one under load, as the chart in k8s/ does it.

bench    gateways and instances started, probed and ended as the chart says, weights that change meanwhile, the report
clients  the load, in a process of its own: every request is counted, every token checked; and what a Kubernetes Service
         does: which gateway a new connection goes to
"""
