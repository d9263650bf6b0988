"""The checks of check_compatibility.py: gather facts about the machine, judge them, print a report.

machine.py -> facts.Facts        with torch_process.py, a child process
table.py   -> table.Result       the table of checks, functions of the facts, the commands that fix a problem,
                                 and the report; cuda_builds.py has the rules

Everything except the code inside the child process needs only the standard library.
"""
