"""The first hour on a card: eight parts that answer what could not be answered without one.

`benchmarks/first_hour.py` runs them. Each part is a module with

  TITLE               the question
  cases(settings)     its cases, in order
  table(results)      lines of Markdown, from the results by name of the case

and each case is a function that returns plain data.
"""
