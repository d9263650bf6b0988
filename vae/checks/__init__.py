"""The checks of check_compatibility.py: gather facts about the machine, judge them, print a report.

machine.py -> facts.Facts        with nvidia_smi.py, packages.py and torch_process.py, a child process
table.py   -> table.Result       the table of checks, functions of the facts; cuda_builds.py has the rules,
                                 remedies.py the commands that fix a problem
report.py                        prints the results as text or JSON

Everything except the code inside the child process needs only the standard library.
"""
