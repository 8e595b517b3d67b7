"""The device's memory, shared by phases through one ledger with a byte budget.

ledger.py   components, their states, and the account of what they hold    build.py    the components of a run
phases.py   what each phase needs, what makes room, and the switches        serving.py  the fleet as a component
offload.py  components made of tensors, and where their bytes go
"""
