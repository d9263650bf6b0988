"""The checks of check_compatibility.py: gather facts about the machine, judge them, print a report.

machine.py -> facts.Facts        with torch_process.py, a child process
table.py   -> table.Result       the table of checks, functions of the facts, and the commands that fix a
                                 problem; cuda_builds.py has the rules
report.py                        text and JSON

Everything except the code inside the child process needs only the standard library.
"""
