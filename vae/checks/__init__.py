"""Judges a machine, in three acts: facts are gathered, checks made of them, a report printed.

gathering.py -> facts.Facts        machine.py, nvidia_smi.py, packages.py and places.py look around;
                                   torch_process.py runs kernels.py in a process of its own (children.py)
judging.py -> results.Check        judging_*.py by subject, pure functions of the facts; cuda_builds.py and
                                   versions.py hold what they know, remedies.py the line that mends
report.py                          the checks as text or JSON

All but kernels.py and what runs inside that process needs only the standard library.
"""
