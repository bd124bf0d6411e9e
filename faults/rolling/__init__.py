"""The operator's drill: processes are killed, stopped, drained, restarted and upgraded under load.

`python -m faults rolling` runs it on two gateways, two workers and one Redis, and reports each step.
"""
