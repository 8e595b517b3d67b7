"""How versions travel.

bench       `hotswap bench transfer`: reads by each transport, by several receivers, between real instances
peer        one end of a read, in a process of its own
hosts       a version on its way to several hosts, by real peers
feeding/    with real instances: a late joiner, and what serving loses while its host feeds another
delta       `hotswap bench delta`: what differences save over shaped links; `delta_trainer` is the trainer's end,
            `delta_training` looks at how much a step of real training changes
"""
