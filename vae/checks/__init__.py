"""The checks of check_compatibility.py: gather facts about the machine, judge them, print a report.

gather.py -> facts.Facts         machine.py, nvidia_smi.py and packages.py read the machine;
                                 torch_process.py runs kernels.py in a child process
table.py  -> table.Result        the table of checks, functions of the facts; cuda_builds.py and versions.py
                                 contain the rules, remedies.py the commands that fix a problem
report.py                        prints the results as text or JSON

Everything except kernels.py and the code inside the child process needs only the standard library.
"""
