"""The machine and the program: errors, console, files, locks, cores, cards. Standard library only."""
